"""Tests for --train.enable_ema in the offline trainers.

The averaged weights are exported and survive a resume. A reward model stores the reward scale of
its averaged weights.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.core.batches import Ragged
from openrlhf.models.adapters import stored_name
from openrlhf.models.scalar import last_token_scores, load_scalar
from tests.loading import load_spec
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.trainers.averaged_job import BETA, SKIPPED, STEPS, Drawn

WHOLE = ["rm-zero0", "rm-zero2", "rm-zero3"]
ADAPTED = ["dpo-zero3-lora"]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.verify), 2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    run_ranks(request.param, "tests.trainers.averaged_job", model, str(out), *WHOLE, *ADAPTED)
    return out


def exported(folder: Path, case: str, run: str) -> Path:
    return (
        folder
        / case
        / run
        / ("adapter_model.safetensors" if "lora" in case else "model.safetensors")
    )


@pytest.mark.parametrize("case", [*WHOLE, *ADAPTED])
def test_export_is_the_average_over_the_applied_steps(folder: Path, case: str) -> None:
    """The average starts at the initial weights and is updated as p̄ ← β p̄ + (1 − β) p.

    A step with a NaN gradient is not counted.
    """
    path = torch.load(folder / case / "path.pt")
    tensors = load_file(exported(folder, case, "whole"))
    names = {name: stored_name(name) if "lora" in case else name for name in path[0]}
    assert tensors.keys() == set(names.values())
    assert len(path) == STEPS + 1
    assert all(torch.equal(path[SKIPPED][name], path[SKIPPED - 1][name]) for name in names)
    moved = 0.0
    for name, stored in names.items():
        average = path[0][name].double()
        for step in (step for step in range(1, STEPS + 1) if step != SKIPPED):
            average = BETA * average + (1 - BETA) * path[step][name].double()
        torch.testing.assert_close(
            tensors[stored].double(), average, atol=1e-7, rtol=1e-6, msg=name
        )
        moved = max(moved, float((path[-1][name] - tensors[stored]).abs().max()))
    assert moved > 1e-3


@pytest.mark.parametrize("case", [*WHOLE, *ADAPTED])
def test_resumed_run_exports_the_same_bytes_as_an_uninterrupted_run(
    folder: Path, case: str
) -> None:
    whole, resumed = (exported(folder, case, run) for run in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    assert (whole.parent / "config.json").read_text() == (
        resumed.parent / "config.json"
    ).read_text()


def test_every_zero_stage_exports_the_same_average(folder: Path) -> None:
    plain, *others = (load_file(exported(folder, case, "whole")) for case in WHOLE)
    for other in others:
        for name, tensor in plain.items():
            torch.testing.assert_close(other[name], tensor, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("case", WHOLE)
def test_reward_model_stores_reward_mean_and_deviation_of_its_averaged_weights(
    folder: Path, case: str
) -> None:
    model = load_scalar(load_spec(folder / case / "whole"), require_head=True)
    batch = Ragged.of([text for row in Drawn("rm").rows for text in (row.chosen, row.rejected)])
    with torch.no_grad():
        rewards = (
            last_token_scores(model(batch.tokens, batch.offsets).values, batch.offsets)
            .double()
            .tolist()
        )
    assert model.mean == pytest.approx(statistics.mean(rewards), abs=1e-6)
    assert model.std == pytest.approx(statistics.stdev(rewards), rel=1e-5)
