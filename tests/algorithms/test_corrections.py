"""Corrections for the mismatch between the sampling engine and the trainer."""

from itertools import product
from typing import cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.corrections import Correction, Level, Mode, correction_weights
from openrlhf.config.choices import CORRECTIONS
from tests.reference import policy

COMBINATIONS = list(product(get_args(Level), get_args(Mode)))
# Log-ratios of a row's tokens, and whether each token was sampled. Sums of eighths are exact.
rows = st.lists(
    st.tuples(st.integers(-24, 24).map(lambda n: n / 8), st.booleans()), min_size=1, max_size=8
)
bands = st.tuples(st.floats(0, 0.9), st.floats(1.1, 8))


def preset(name: str, low: float = 0.5, high: float = 5.0) -> Correction:
    level, mode = cast(tuple[Level, Mode], CORRECTIONS[name])
    return Correction(level=level, mode=mode, low=low, high=high)


def row_of(omegas: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log π_old, log π_rollout, mask) of one row with these ratios."""
    old = torch.tensor([omegas]).log() - 1
    return old, torch.full_like(old, -1.0), torch.ones_like(old, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "omegas", "expected"),
    [
        ("tis", [0.4, 1.0, 9.0], [0.5, 1.0, 5.0]),
        ("icepop", [0.4, 1.0, 9.0], [0.0, 1.0, 0.0]),
        (
            "seq-mask-tis",
            [0.4, 1.0, 9.0],
            [0.4, 1.0, 9.0],
        ),  # mean 3.6^(1/3) = 1.53: the row is kept
        (
            "seq-mask-tis",
            [2.0, 2.0, 2.0],
            [2.0, 2.0, 2.0],
        ),  # mean 2, regardless of the product: the row is kept
        (
            "seq-mask-tis",
            [6.0, 1.0, 27.0],
            [0.0, 0.0, 0.0],
        ),  # mean 162^(1/3) = 5.45: the row is dropped
        (
            "seq-mask-tis",
            [0.1, 0.5, 1.0],
            [0.0, 0.0, 0.0],
        ),  # mean 0.05^(1/3) = 0.37: the row is dropped
    ],
)
def test_correction_presets_match_a_worked_example(
    name: str, omegas: list[float], expected: list[float]
) -> None:
    weights, _ = correction_weights(*row_of(omegas), preset(name))
    assert weights.tolist()[0] == pytest.approx(expected)


def test_tis_with_lower_bound_0_equals_truncation_as_in_the_paper() -> None:
    row = row_of([0.01, 1.0, 9.0])
    clipped, _ = correction_weights(*row, preset("tis", 0.0, 2.0))
    truncation = Correction(level="token", mode="truncate", low=0.5, high=2.0)
    truncated, outside = correction_weights(*row, truncation)
    assert torch.equal(clipped, truncated)
    assert truncated.tolist()[0] == pytest.approx([0.01, 1.0, 2.0])
    assert outside.tolist() == [[False, False, True]], "truncation has no lower bound"


@pytest.mark.parametrize(("level", "mode"), COMBINATIONS)
def test_every_level_and_mode_matches_the_reference(level: Level, mode: Mode) -> None:
    generator = torch.Generator().manual_seed(0)
    old, rollout = torch.randn(2, 8, 6, dtype=torch.float64, generator=generator) * 0.7
    mask = torch.rand(8, 6, generator=generator) < 0.7
    weights, _ = correction_weights(
        old, rollout, mask, Correction(level=level, mode=mode, low=0.5, high=2.0)
    )
    for row in range(8):
        expected = policy.correction(
            old[row].tolist(), rollout[row].tolist(), mask[row].tolist(), level, mode, 0.5, 2.0
        )
        assert weights[row].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("level", "mode"), COMBINATIONS)
@settings(max_examples=30)
@given(row=rows, band=bands)
def test_weights_match_the_reference_for_any_row_and_band(
    level: Level, mode: Mode, row: list[tuple[float, bool]], band: tuple[float, float]
) -> None:
    old, mask = (
        torch.tensor([[x for x, _ in row]]).double(),
        torch.tensor([[acts for _, acts in row]]),
    )
    correction = Correction(level=level, mode=mode, low=band[0], high=band[1])
    weights, outside = correction_weights(old, torch.zeros_like(old), mask, correction)
    expected = policy.correction(
        old[0].tolist(), [0.0] * len(row), mask[0].tolist(), level, mode, *band
    )
    assert weights.tolist()[0] == pytest.approx(expected)
    inside = (mask & ~outside)[0]
    judged = policy.correction(
        old[0].tolist(), [0.0] * len(row), mask[0].tolist(), level, "clip", 0.0, 1e30
    )
    low = 0.0 if mode == "truncate" else band[0]
    assert inside.tolist() == [
        acts and low <= w <= band[1] for w, acts in zip(judged, mask[0].tolist(), strict=True)
    ]


@pytest.mark.parametrize(("level", "mode"), COMBINATIONS)
@settings(max_examples=30)
@given(row=rows, data=st.data())
def test_weights_follow_the_token_order_and_ignore_padding(
    level: Level, mode: Mode, row: list[tuple[float, bool]], data: st.DataObject
) -> None:
    correction = Correction(level=level, mode=mode, low=0.5, high=2.0)
    order = data.draw(st.permutations(range(len(row))))

    def weights(row: list[tuple[float, bool]]) -> Tensor:
        old, mask = (
            torch.tensor([[x for x, _ in row]]).double(),
            torch.tensor([[acts for _, acts in row]]),
        )
        return correction_weights(old, torch.zeros_like(old), mask, correction)[0][0]

    assert torch.equal(weights([row[i] for i in order]), weights(row)[order])
    assert torch.equal(weights([(5.0, False), *row, (-5.0, False)])[1:-1], weights(row))


@pytest.mark.parametrize(("level", "mode"), COMBINATIONS)
def test_weights_are_1_for_equal_log_probabilities(level: Level, mode: Mode) -> None:
    same, mask = torch.full((2, 3), -1.5), torch.tensor([[True, True, False], [True, False, False]])
    weights, outside = correction_weights(
        same, same, mask, Correction(level=level, mode=mode, low=0.5, high=2.0)
    )
    assert torch.equal(weights, mask.float())
    assert not outside.any()


@pytest.mark.parametrize(("level", "mode"), COMBINATIONS)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_weights_are_finite_for_any_mismatch(level: Level, mode: Mode, gap: float) -> None:
    rollout, mask = torch.zeros(2, 50), torch.ones(2, 50, dtype=torch.bool)
    weights, outside = correction_weights(
        rollout + gap, rollout, mask, Correction(level=level, mode=mode, low=0.5, high=2.0)
    )
    assert weights.isfinite().all()
    assert (weights <= 2.0).all()
    assert outside.all() or (mode == "truncate" and gap < 0)


@pytest.mark.parametrize(("level", "mode"), COMBINATIONS)
def test_corrected_loss_of_a_row_without_actions_is_a_differentiable_zero(
    level: Level, mode: Mode
) -> None:
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    dirty = torch.full((2, 4), float("nan"))
    weights, outside = correction_weights(
        dirty, dirty, nothing, Correction(level=level, mode=mode, low=0.5, high=2.0)
    )
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


def test_row_levels_mark_all_tokens_of_a_row_outside_the_band() -> None:
    row = row_of([6.0, 1.0, 27.0])
    assert correction_weights(*row, preset("icepop"))[1].tolist() == [[True, False, True]]
    assert correction_weights(*row, preset("seq-mask-tis"))[1].tolist() == [[True, True, True]]
    old, rollout, _ = row
    acting = torch.tensor([[True, False, True]])
    assert correction_weights(old, rollout, acting, preset("seq-mask-tis"))[1].equal(acting)
