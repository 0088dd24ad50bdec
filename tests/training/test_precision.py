"""Tests that the float32 master weights of bfloat16 models start at unrounded values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.training.precision_worker import (
    BETA,
    CHOSEN,
    DPO_BETA,
    DPO_RATE,
    DPO_STEPS,
    RATE,
    REJECTED,
    STEPS,
    load,
)

STORED = {
    "float32": "qwen2-tied",
    "float32-experts": "qwen3-moe",
    "float16": "llama",
    "bfloat16": "qwen2-untied",
}
Case = tuple[str, str, int, str]  # model kind, stored data type, ZeRO stage, offload
EVERY_STAGE: list[Case] = [
    (kind, "float32", stage, "plain")
    for kind in ("policy", "adapters", "scalar")
    for stage in range(4)
]
OTHER_FILES: list[Case] = [
    ("policy", stored, stage, "plain") for stored in list(STORED)[1:] for stage in (2, 3)
]
OFFLOADED: list[Case] = [
    (kind, "float32", stage, "offload") for kind in ("policy", "adapters") for stage in (1, 2, 3)
]
AVERAGED: list[Case] = [("averaged", "float32", stage, "plain") for stage in (1, 2, 3)]
PREFERRED: list[Case] = [("preferred", "float32", stage, "plain") for stage in (1, 2, 3)]
EVERY_CASE = EVERY_STAGE + OTHER_FILES + OFFLOADED + AVERAGED + PREFERRED
# Cases that always run: a policy at every ZeRO stage, and all other kinds at the highest stage.
QUICK = [
    case
    for case in EVERY_CASE
    if (case[2] == 3 and case not in OFFLOADED) or case in EVERY_STAGE[:4]
]
Measured = Callable[[Case], Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one model per stored data type. Their configurations declare float32."""
    folder = tmp_path_factory.mktemp("models")
    for stored, kind in STORED.items():
        save_tiny_model(folder / stored, kind)
        file = folder / stored / "model.safetensors"
        dtype = getattr(torch, stored.partition("-")[0])
        save_file(
            {name: tensor.to(dtype) for name, tensor in load_file(file).items()},
            file,
            {"format": "pt"},
        )
    return folder


@pytest.fixture(scope="module")
def measured(models: Path) -> Measured:
    """Return a function that maps a case to its results.

    One run computes all quick cases, and a second run computes all other cases.
    """

    @cache
    def run(quick: bool) -> dict[str, Any]:
        cases = [case for case in EVERY_CASE if (case in QUICK) == quick]
        out = models / f"results-{quick}.pt"
        run_ranks(
            2,
            "tests.training.precision_worker",
            str(out),
            *(name_of(models, case) for case in cases),
        )
        return torch.load(out)["masters"]

    return lambda case: run(case in QUICK)[name_of(models, case)]


def name_of(models: Path, case: Case) -> str:
    kind, stored, stage, offload = case
    return f"{stage},{offload},{kind},{models / stored}"


def by_case(cases: list[Case]) -> pytest.MarkDecorator:
    """Run a test for each case; slow cases run only in `make verify`."""
    marked = [
        pytest.param(
            case, marks=() if case in QUICK else pytest.mark.verify, id="-".join(map(str, case))
        )
        for case in cases
    ]
    return pytest.mark.parametrize("case", marked)


def check(found: dict[str, tuple[Tensor, Tensor]], path: Path, kind: str) -> None:
    """Check that master weights equal a float32 run's weights and round to the model's weights."""
    exact = dict(load(str(path), kind, "fp32").hf.named_parameters())
    assert found.keys() == {name for name, weight in exact.items() if weight.requires_grad}
    for name, (master, weight) in found.items():
        assert torch.equal(master, exact[name].data), name
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.to(torch.bfloat16)), (
            name
        )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.verify), 2])
def test_steps_smaller_than_bfloat16_spacing_accumulate_in_every_zero_stage(
    tmp_path: Path, ranks: int
) -> None:
    run_ranks(ranks, "tests.training.precision_worker", str(tmp_path / "results.pt"))
    one, step = torch.ones((), dtype=torch.bfloat16), torch.tensor(RATE, dtype=torch.bfloat16)
    assert one - step == one  # without master weights, the weight would not change
    for stage, weight in torch.load(tmp_path / "results.pt")["weights"].items():
        expected = torch.full((8, 8), 1 - STEPS * RATE)
        torch.testing.assert_close(weight, expected, atol=2**-8, rtol=0, msg=f"ZeRO stage {stage}")


@by_case(EVERY_STAGE + OTHER_FILES)
def test_master_weights_of_a_new_engine_are_not_rounded(
    models: Path, measured: Measured, case: Case
) -> None:
    """A float32 run initializes adapters and heads identically, so they can be compared too."""
    kind, stored, _, _ = case
    found = measured(case)
    check(found, models / stored, kind)
    rounded = all(torch.equal(master, weight.float()) for master, weight in found.values())
    assert rounded == (stored == "bfloat16")
    if (kind, stored) == ("policy", "float32"):
        file = load_file(models / stored / "model.safetensors")
        assert all(torch.equal(found[name][0], file[name]) for name in file)


@by_case(AVERAGED)
def test_average_is_computed_from_master_weights_and_changed_weights_are_counted(
    measured: Measured, case: Case
) -> None:
    found = measured(case)
    start, *path = found["course"]
    for name, weight in start.items():
        average = weight.double()
        for later in path:
            average = BETA * average + (1 - BETA) * later[name].double()
        torch.testing.assert_close(
            found["masters"][name].double(), average, atol=1e-8, rtol=1e-6, msg=name
        )
        assert torch.equal(found["rounded"][name], found["masters"][name].to(torch.bfloat16)), name
        # Training continues with the same master weights as before the export.
        assert torch.equal(found["after"][name], path[-1][name]), name
    for name, restarted in found["restarted"].items():  # with ZeRO-3, there are no such weights
        assert torch.equal(restarted, path[-1][name]), name
    for (before, after), share in zip(pairwise(found["course"]), found["changed"], strict=True):
        changed = sum(int((after[n].bfloat16() != before[n].bfloat16()).sum()) for n in start)
        assert share == pytest.approx(changed / sum(weight.numel() for weight in start.values()))
        assert 0 < share < 0.5


@by_case(PREFERRED)
def test_dpo_in_bfloat16_learns_like_float32_under_autocast(
    models: Path, measured: Measured, case: Case
) -> None:
    """If master weights started at rounded values, few would change and the loss would stall."""
    losses, expected = measured(case), autocast_losses(models / case[1])
    assert losses[0] == expected[0] == pytest.approx(0.6931, abs=1e-4)
    fall, expected_fall = losses[0] - losses[-1], expected[0] - expected[-1]
    assert expected_fall > 0.1
    assert fall == pytest.approx(expected_fall, rel=0.25)


def autocast_losses(path: Path) -> list[float]:
    """Return the DPO losses of a plain autocast loop."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=DPO_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )

    def total(tokens: list[int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.tensor([tokens])).logits
        logprobs = logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, torch.tensor(tokens)[1:, None]).sum()

    with torch.no_grad():
        reference = total(CHOSEN) - total(REJECTED)
    losses: list[float] = []
    for _ in range(DPO_STEPS):
        loss = -logsigmoid(DPO_BETA * (total(CHOSEN) - total(REJECTED) - reference))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


@by_case(OFFLOADED)
def test_master_weights_offloaded_to_cpu_memory_are_not_rounded(
    models: Path, measured: Measured, case: Case
) -> None:
    kind, stored, _, _ = case
    check(measured(case), models / stored, kind)
