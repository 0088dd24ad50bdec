"""Corrections for the mismatch between the sampling engine and the trainer."""

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.corrections import (
    Correction,
    Gating,
    Level,
    Mode,
    correction_weights,
    filtered_units,
    gate_statistic,
)
from openrlhf.config.choices import CORRECTIONS as PRESETS
from openrlhf.config.legacy_values import LEVELS
from tests.reference import policy

GATES: list[tuple[Gating, Level]] = [
    ("ratio", "token"),
    ("ratio", "seq"),
    ("ratio", "seq-product"),
    ("binary_kl", "token"),
    ("binary_kl", "seq"),
    ("tv", "token"),
    ("tv", "seq"),
]
# Every accepted combination of gating, level and mode, with a band that keeps some tokens.
CORRECTIONS = [
    Correction(
        gating=gating,
        level=level,
        mode="mask",
        low=0.5 if gating == "ratio" else 0.0,
        high=2.0 if gating == "ratio" else 0.05,
    )
    for gating, level in GATES
]
CLIPS: list[Level] = ["token", "seq", "seq-product"]
CORRECTIONS += [
    Correction(gating="ratio", level=level, mode="clip", low=0.5, high=2.0) for level in CLIPS
]
# A row is a list of (log-ratio, is sampled) pairs; multiples of ⅛ add up exactly.
rows = st.lists(
    st.tuples(st.integers(-24, 24).map(lambda n: n / 8), st.booleans()), min_size=1, max_size=8
)


def named(correction: Correction) -> str:
    return f"{correction.gating}-{correction.level}-{correction.mode}"


every_correction = pytest.mark.parametrize("correction", CORRECTIONS, ids=named)


def preset(name: str, low: float = 0.5, high: float = 5.0) -> Correction:
    old_level, old_mode = PRESETS[name]
    level, mode = cast(tuple[Level, Mode], (LEVELS[old_level], old_mode))
    return Correction(gating="ratio", level=level, mode=mode, low=low, high=high)


def row_of(omegas: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log π_old, log π_rollout, mask) for one row with the given ratios."""
    old = torch.tensor([omegas]).log() - 1
    return old, torch.full_like(old, -1.0), torch.ones_like(old, dtype=torch.bool)


def random_rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log π_old, log π_rollout, mask), including probabilities close to 0 and to 1.

    The mismatch grows from the first row to the last.
    """
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(8, 6, dtype=torch.float64, generator=generator) * 4
    rollout[0, :3] = torch.tensor([-1e-9, -30.0, -1e-3])
    mismatch = torch.linspace(0.05, 1.5, 8, dtype=torch.float64)[:, None]
    noise = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    old = rollout + mismatch * (0.5 * noise - 1)
    mask = torch.rand(8, 6, generator=generator) < 0.7
    mask[0, :3] = True
    return old.clamp(max=0).to(dtype), rollout.to(dtype), mask


def reference_weights(old: Tensor, rollout: Tensor, mask: Tensor, each: Correction) -> Tensor:
    """Return the weights that the float64 loop computes for every row."""
    weights = [
        policy.correction(*row, each.level, each.mode, each.low, each.high, each.gating)
        for row in zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True)
    ]
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "omegas", "expected"),
    [
        ("tis", [0.4, 1.0, 9.0], [0.5, 1.0, 5.0]),
        ("icepop", [0.4, 1.0, 9.0], [0.0, 1.0, 0.0]),
        (
            "seq-mask-tis",
            [0.4, 1.0, 9.0],
            [0.4, 1.0, 9.0],
        ),  # the geometric mean is 3.6^(1/3) = 1.53, so the row is kept
        (
            "seq-mask-tis",
            [2.0, 2.0, 2.0],
            [2.0, 2.0, 2.0],
        ),  # the geometric mean is 2 (the product is 8), so the row is kept
        (
            "seq-mask-tis",
            [6.0, 1.0, 27.0],
            [0.0, 0.0, 0.0],
        ),  # the geometric mean is 162^(1/3) = 5.45, so the row is dropped
        (
            "seq-mask-tis",
            [0.1, 0.5, 1.0],
            [0.0, 0.0, 0.0],
        ),  # the geometric mean is 0.05^(1/3) = 0.37, so the row is dropped
    ],
)
def test_correction_presets_match_a_worked_example(
    name: str, omegas: list[float], expected: list[float]
) -> None:
    weights, _ = correction_weights(*row_of(omegas), preset(name))
    assert weights.tolist()[0] == pytest.approx(expected)


def test_tis_with_lower_bound_0_truncates_as_in_the_paper() -> None:
    truncated, outside = correction_weights(*row_of([0.01, 1.0, 9.0]), preset("tis", 0.0, 2.0))
    assert truncated.tolist()[0] == pytest.approx([0.01, 1.0, 2.0])
    assert outside.tolist() == [[False, False, True]], "there is no lower bound"


@pytest.mark.parametrize(
    ("gating", "expected"),
    # KL for p = 0.5 and q = 0.25: ln 2 / 2 + ln (2/3) / 2
    [("binary_kl", 0.143841), ("tv", 0.25), ("ratio", 0.5)],
)
def test_gate_statistics_match_a_worked_example(gating: Gating, expected: float) -> None:
    old, rollout, mask = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log(), torch.ones(1, 1)
    statistic = gate_statistic(old, rollout, mask > 0, gating=gating, level="token")
    assert statistic.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gating", "level"), GATES)
def test_gate_statistics_match_the_float64_loop(
    gating: Gating, level: Level, dtype: torch.dtype
) -> None:
    old, rollout, mask = random_rows(dtype)
    statistic = gate_statistic(old, rollout, mask, gating=gating, level=level)
    for row in range(len(old)):
        columns = old[row].tolist(), rollout[row].tolist(), mask[row].tolist()
        expected = torch.tensor(policy.gate(*columns, level, gating), dtype=torch.float64)
        torch.testing.assert_close(
            statistic[row][mask[row]].double(), expected[mask[row]], rtol=2e-6, atol=1e-12
        )


@every_correction
def test_weights_match_the_float64_loop(correction: Correction) -> None:
    old, rollout, mask = random_rows()
    weights, outside = correction_weights(old, rollout, mask, correction)
    torch.testing.assert_close(weights, reference_weights(old, rollout, mask, correction))
    assert 0 < int(outside.sum()) < int(mask.sum()), "the band separates the tokens"


@every_correction
@settings(max_examples=30)
@given(row=rows)
def test_weights_match_the_float64_loop_for_any_row(
    correction: Correction, row: list[tuple[float, bool]]
) -> None:
    old, mask = torch.tensor([[x for x, _ in row]]).double(), torch.tensor([[m for _, m in row]])
    rollout = torch.full_like(old, -3.0)
    weights, outside = correction_weights(old - 3, rollout, mask, correction)
    torch.testing.assert_close(weights, reference_weights(old - 3, rollout, mask, correction))
    gated = policy.gate(
        (old[0] - 3).tolist(),
        rollout[0].tolist(),
        mask[0].tolist(),
        correction.level,
        correction.gating,
    )
    inside = [correction.low <= value <= correction.high for value in gated]
    assert (mask & ~outside)[0].tolist() == [
        acts and kept for acts, kept in zip(mask[0].tolist(), inside, strict=True)
    ]


@every_correction
@settings(max_examples=30)
@given(row=rows, data=st.data())
def test_weights_follow_the_token_order_and_ignore_padding(
    correction: Correction, row: list[tuple[float, bool]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(row))))

    def weights(row: list[tuple[float, bool]]) -> Tensor:
        old, mask = (
            torch.tensor([[x for x, _ in row]]).double(),
            torch.tensor([[acts for _, acts in row]]),
        )
        return correction_weights(old, torch.zeros_like(old), mask, correction)[0][0]

    torch.testing.assert_close(weights([row[i] for i in order]), weights(row)[order])
    padded = weights([(5.0, False), *row, (-5.0, False)])[1:-1]
    torch.testing.assert_close(padded, weights(row))


@every_correction
def test_weights_are_1_for_equal_log_probabilities(correction: Correction) -> None:
    same, mask = torch.full((2, 3), -1.5), torch.tensor([[True, True, False], [True, False, False]])
    weights, outside = correction_weights(same, same, mask, correction)
    assert torch.equal(weights, mask.float())
    assert not outside.any()


@every_correction
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_weights_are_finite_for_any_mismatch(correction: Correction, gap: float) -> None:
    rollout, mask = torch.full((2, 50), -0.5), torch.ones(2, 50, dtype=torch.bool)
    weights, outside = correction_weights(rollout + gap, rollout, mask, correction)
    assert weights.isfinite().all()
    assert (weights <= 2.0).all()
    assert outside.all()


@every_correction
def test_corrected_loss_of_a_row_without_actions_is_a_differentiable_zero(
    correction: Correction,
) -> None:
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    dirty = torch.full((2, 4), float("nan"))
    weights, outside = correction_weights(dirty, dirty, nothing, correction)
    terms = torch.ones(2, 4, requires_grad=True)
    (weights * terms).sum().backward()
    assert terms.grad is not None
    assert not terms.grad.any()
    assert not outside.any()


def test_correction_weights_have_no_gradient() -> None:
    old, rollout, mask = row_of([0.9, 1.1])
    assert not correction_weights(old.requires_grad_(), rollout, mask, preset("tis"))[
        0
    ].requires_grad


def test_sequence_levels_mark_all_actions_of_a_row_outside_the_band() -> None:
    row = row_of([6.0, 1.0, 27.0])
    assert correction_weights(*row, preset("icepop"))[1].tolist() == [[True, False, True]]
    assert correction_weights(*row, preset("seq-mask-tis"))[1].tolist() == [[True, True, True]]
    old, rollout, _ = row
    acting = torch.tensor([[True, False, True]])
    assert correction_weights(old, rollout, acting, preset("seq-mask-tis"))[1].equal(acting)


def test_filtered_units_are_counted_in_tokens_or_in_rows_with_actions() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    outside = torch.tensor([[True, True, False], [False, False, False], [False, False, False]])
    assert filtered_units(outside, mask, "token") == (2, 5)
    assert filtered_units(outside, mask, "seq") == (1, 2)
    assert filtered_units(outside, mask, "seq-product") == (1, 2)
