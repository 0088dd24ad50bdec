"""The moving average of the policy's weights in exports and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.workers.average_job import BETA

CASES = ["zero0-fp32", "zero1-bf16", "zero2-fp32", "zero3-fp32"]
ADAPTED = [f"{case}-lora" for case in CASES]


@pytest.fixture(scope="module", params=[1, 2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    run_ranks(request.param, "tests.workers.average_job", model, str(out), *CASES, *ADAPTED)
    return out


@pytest.mark.parametrize("case", CASES)
def test_export_is_the_moving_average_over_applied_steps(folder: Path, case: str) -> None:
    """The average p̄ starts at the initial weights; each applied step sets p̄ ← β p̄ + (1 − β) p."""
    start, *path = torch.load(folder / case / "path.pt")
    exported = load_file(folder / case / "whole/model.safetensors")
    assert exported.keys() == start.keys()
    rounding = 2**-8 if case.endswith("bf16") else 1e-6
    for name, weight in start.items():
        average = weight.double()
        for later in path:
            average = BETA * average + (1 - BETA) * later[name].double()
        torch.testing.assert_close(
            exported[name].double(), average, atol=1e-7, rtol=rounding, msg=name
        )
        assert exported[name].dtype == (torch.bfloat16 if case.endswith("bf16") else torch.float32)
    moved = [float((path[-1][name].float() - exported[name].float()).abs().max()) for name in start]
    assert max(moved) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_exports_the_same_bytes_as_an_uninterrupted_run(
    folder: Path, case: str
) -> None:
    whole, resumed = (folder / case / run / "model.safetensors" for run in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()


@pytest.mark.parametrize("case", ADAPTED)
def test_resumed_run_exports_the_same_adapter_average_as_an_uninterrupted_run(
    folder: Path, case: str
) -> None:
    """The checkpoint contains the adapters and their optimizer state, but no frozen weights."""
    whole, resumed = (
        folder / case / run / "adapter_model.safetensors" for run in ("whole", "resumed")
    )
    assert whole.read_bytes() == resumed.read_bytes()
    start, *_, end = torch.load(folder / case / "path.pt")
    adapted = [name for name in start if not torch.equal(start[name], end[name])]
    assert len(adapted) == len([name for name in start if "_proj.weight" in name])
    files = list((folder / case / "checkpoint/global_step2").glob("*model_states.pt"))
    states = [torch.load(file, weights_only=False) for file in files]
    assert states and all(".lora_" in name for state in states for name in state["module"] or ())
