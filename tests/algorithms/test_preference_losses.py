"""Losses for pairs and labeled answers.

Losses are compared with a loop over single pairs, and gradients are compared with finite
differences.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES, Judged, Strength, kto
from tests.reference.preferences import answer_loss, pair_loss

SUMS = st.floats(-40, -0.5)
PAIR = st.tuples(SUMS, SUMS, SUMS, SUMS, st.integers(1, 30), st.integers(1, 30))
LOSSES = list(PREFERENCE_LOSSES)


def judged(pairs: list[tuple[float, ...]]) -> Judged:
    policy, reference, tokens = torch.tensor(pairs, dtype=torch.float64).split(2, 1)
    return Judged(policy=policy, reference=reference, tokens=tokens)


@pytest.mark.parametrize("name", LOSSES)
@given(
    pairs=st.lists(PAIR, min_size=1, max_size=4),
    beta=st.floats(0.01, 3),
    eps=st.floats(0, 0.49),
    gamma=st.floats(0, 2),
)
def test_preference_losses_match_the_papers(
    name: str, pairs: list[tuple[float, ...]], beta: float, eps: float, gamma: float
) -> None:
    found = PREFERENCE_LOSSES[name](judged(pairs), Strength(beta=beta, smoothing=eps, target=gamma))
    expected = [
        pair_loss(name, (a, b), (c, d), (int(m), int(n)), beta, eps, gamma)
        for a, b, c, d, m, n in pairs
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_preference_losses_pass_gradcheck(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    known = -8 * torch.rand(4, 5, dtype=torch.float64, generator=generator) - 0.5

    def loss(sums: Tensor) -> Tensor:
        lengths = torch.tensor([3.0, 5, 2, 7, 4], dtype=torch.float64)
        pairs = Judged(
            policy=sums.T, reference=known[2:].T, tokens=torch.stack([lengths, lengths.flip(0)], 1)
        )
        return PREFERENCE_LOSSES[name](pairs, Strength(beta=0.3, smoothing=0.2, target=0.5))

    assert torch.autograd.gradcheck(loss, (known[:2].clone().requires_grad_(),))


def test_preference_loss_with_equal_log_ratios_is_log_2() -> None:
    alike = judged([(-3.0, -5.0, -3.0, -5.0, 2, 4)])
    assert PREFERENCE_LOSSES["dpo"](alike, Strength(beta=0.1)).tolist() == pytest.approx(
        [math.log(2)]
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sums", [(-1e4, -1e-7), (-1e-9, -1e4), (0.0, 0.0)])
def test_preference_losses_and_gradients_are_finite_for_any_log_ratio(
    name: str, sums: tuple[float, float]
) -> None:
    """The cases include an answer with probability 1, which has infinite odds."""
    chosen, rejected = (torch.tensor([number], requires_grad=True) for number in sums)
    ones = torch.ones(1, 2)
    pairs = Judged(policy=torch.stack([chosen, rejected], 1), reference=-ones, tokens=ones)
    loss = PREFERENCE_LOSSES[name](pairs, Strength(beta=0.1, smoothing=0.1))
    loss.sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert loss.isfinite().all() and chosen.grad.isfinite().all() and rejected.grad.isfinite().all()


@given(
    rows=st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=6),
    kl=st.floats(-5, 20),
    beta=st.floats(0.01, 1),
    weights=st.tuples(st.floats(0, 3), st.floats(0, 3)),
)
def test_kto_matches_the_paper(
    rows: list[tuple[float, bool]], kl: float, beta: float, weights: tuple[float, float]
) -> None:
    ratio = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    desirable = torch.tensor([label for _, label in rows])
    found = kto(
        ratio, desirable, kl, beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1]
    )
    assert found.tolist() == pytest.approx(
        [answer_loss(r, d, kl, beta, weights) for r, d in rows], rel=1e-6, abs=1e-12
    )


def test_kto_passes_gradcheck() -> None:
    ratio = torch.linspace(-3, 3, 6, dtype=torch.float64, requires_grad=True)
    desirable = torch.tensor([True, False] * 3)

    def loss(ratio: Tensor) -> Tensor:
        return kto(ratio, desirable, 0.7, beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)

    assert torch.autograd.gradcheck(loss, (ratio,))
