"""Tests of AdamW with 8-bit moments in all layouts: against float64, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrlhf.config.optimizer import AdamConfig
from tests.reference.supervised import mean_loss
from tests.training.optimizer_worker import EMA, Case, run_all
from tests.training.window_worker import batch

STEPS = 8
ADAM = AdamConfig(lr=1e-3, weight_decay=0.1)
# Errors relative to the distance that a weight has moved. Rounding to 8 bits causes 2 to 3 %.
# Weights with 32-bit moments deviate only because the rounded weights do.
ROUNDING = (0.01, 0.05)
SHARED_BLOCKS = (0.05, 0.2)  # error of the worst weight if some blocks hold moments of two weights
UNROUNDED = (0.0, 0.01)
EightBit = partial(Case, optim="adam_8bit", adam=ADAM, model="llama-wide", steps=STEPS)


def is_8bit(name: str, weight: Tensor) -> bool:
    """Return whether the weight has 8-bit moments."""
    return weight.ndim == 2 and weight.numel() >= 4096 and "embed" not in name


def reference(folder: Path, case: Case) -> list[dict[str, Tensor]]:
    """Return the weights before the first step and after the last step of AdamW in float64."""
    hf = AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=torch.float64)
    parameters = dict(hf.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1]},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = case.adam
    optimizer = torch.optim.AdamW(
        groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
    )
    weights = [{name: p.detach().clone() for name, p in parameters.items()}]
    for step in range(case.steps):
        hf.zero_grad()
        ((10.0 if step == 0 else 1.0) * mean_loss(hf, batch(step))).backward()
        if case.max_norm:
            torch.nn.utils.clip_grad_norm_(parameters.values(), case.max_norm)
        optimizer.step()
    weights.append({name: p.detach().clone() for name, p in parameters.items()})
    return weights


def errors(
    start: dict[str, Tensor], end: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, float]:
    """Return each weight's error at the end, relative to the distance from the start."""
    found: dict[str, float] = {}
    for name, weight in end.items():
        moved = (exact[name] - start[name]).double().norm()
        found[name] = float((weight.double() - exact[name].double()).norm() / moved)
    return found


def check_errors(found: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]) -> None:
    """Check that weights have rounding errors if and only if their moments have 8 bits."""
    of_weights = errors(exact[0], found[STEPS], exact[-1])
    assert len(of_weights) == len(exact[0])
    for name, error in of_weights.items():
        least, most = ROUNDING if is_8bit(name, exact[0][name]) else UNROUNDED
        assert least < error < most, (name, error)


def check_average(found: list[dict[str, Tensor]]) -> None:
    """Check the average of the weights after each step."""
    *weights, average = found
    expected = weights[0]
    for after in weights[1:]:
        expected = {name: EMA * expected[name] + (1 - EMA) * after[name] for name in after}
    for name, value in average.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


SAMPLE = [EightBit(zero=3, resume_at=3, sleep=True)]


def matrix() -> list[Case]:
    """Return cases for every ZeRO stage on one and two ranks, and for the other settings."""
    cases: list[Case] = []
    for zero in range(4):
        cases += [
            EightBit(zero=zero, ranks=1),
            EightBit(zero=zero),
            EightBit(zero=zero, resume_at=5, max_norm=1.0),
            EightBit(zero=zero, ranks=1, resume_at=5),
            EightBit(zero=zero, tp=2),
        ]
        if zero:
            cases.append(EightBit(zero=zero, offload=True))
    return cases


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(matrix(), id="all", marks=[pytest.mark.verify, pytest.mark.timeout(900)]),
    ],
)
def test_only_weights_with_rounded_moments_differ_from_float64_adamw(
    cases: list[Case], tmp_path: Path
) -> None:
    results = run_all(cases, tmp_path)
    plain, clipped = reference(tmp_path, EightBit()), reference(tmp_path, EightBit(max_norm=1.0))
    for case, found in results.items():
        check_errors(found, clipped if case.max_norm else plain)
        check_average(found)
    with pytest.raises(AssertionError):
        check_errors([clipped[0]] * STEPS + [clipped[1]], plain)


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_resumed_and_offloaded_runs_have_the_same_weights(tmp_path: Path) -> None:
    plain = [EightBit(zero=zero, ranks=ranks) for zero in range(4) for ranks in (1, 2)]
    plain += [EightBit(zero=zero, dtype="bf16") for zero in range(4)]
    plain += [EightBit(zero=zero, lora=64) for zero in range(4)]
    pairs = [(case, replace(case, resume_at=3)) for case in plain]
    pairs += [(case, replace(case, offload=True)) for case in plain if case.zero]
    results = run_all([*plain, *(other for _, other in pairs)], tmp_path)
    for one, other in pairs:
        for mine, theirs in zip(results[one], results[other], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine), other


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_adapters_and_bfloat16_weights_are_close_to_results_of_32_bit_moments(
    tmp_path: Path,
) -> None:
    cases = [EightBit(zero=zero, lora=64) for zero in range(4)]
    cases += [EightBit(zero=zero, dtype="bf16") for zero in range(4)]
    exact = [replace(case, optim="adam") for case in cases]
    results = run_all([*cases, *exact], tmp_path)
    for case, other in zip(cases, exact, strict=True):
        start, end = results[other][0], results[other][STEPS]
        found = errors(start, results[case][STEPS], end)
        trained = [name for name in found if is_8bit(name, start[name])]
        if case.lora:
            trained = [name for name in trained if "proj" in name]
        assert len(trained) >= 8
        for name in trained:
            assert ROUNDING[0] < found[name] < ROUNDING[1], (case, name, found[name])


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_blocks_that_span_two_weights_have_larger_rounding_errors(tmp_path: Path) -> None:
    """ZeRO joins weights, so a block can begin in one weight and end in the next."""
    cases = [EightBit(zero=zero, ranks=1, model="llama-wide-odd") for zero in range(1, 4)]
    results = run_all(cases, tmp_path)
    exact = reference(tmp_path, cases[0])
    for case, found in results.items():
        worst = max(errors(exact[0], found[STEPS], exact[-1]).values())
        assert SHARED_BLOCKS[0] < worst < SHARED_BLOCKS[1], (case, worst)
