"""The load-balancing loss of a mixture of experts."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf.algorithms.experts import load_balancing_loss

DRAW = torch.Generator().manual_seed(0)


def test_load_balancing_loss_is_top_k_if_experts_are_used_equally() -> None:
    """Each of four tokens is routed to a different expert with probability 1.

    Every expert has a token share and a mean probability of ¼, so the loss is 4 · 4 · ¼ · ¼ = 1.
    """
    assert float(load_balancing_loss([100 * torch.eye(4)], top_k=1)) == pytest.approx(1.0)
    assert float(
        load_balancing_loss([torch.randn(20_000, 4, generator=DRAW)], top_k=2)
    ) == pytest.approx(2.0, abs=0.01)


def test_load_balancing_loss_is_the_number_of_experts_if_only_one_is_used() -> None:
    logits = torch.zeros(5, 4)
    logits[:, 2] = 100.0
    assert float(load_balancing_loss([logits], top_k=1)) == pytest.approx(4.0)


def test_load_balancing_loss_matches_a_worked_example() -> None:
    """Two tokens with probabilities (¾, ¼) and (⅔, ⅓) both choose the first expert.

    The loss is 2 · (1 · 17/24 + 0 · 7/24) = 17/12.
    """
    logits = torch.tensor([[math.log(3.0), 0.0], [math.log(2.0), 0.0]])
    assert float(load_balancing_loss([logits], top_k=1)) == pytest.approx(17 / 12)


def test_load_balancing_loss_pools_all_layers() -> None:
    first, second = torch.randn(2, 7, 5, generator=DRAW)
    together = load_balancing_loss([torch.cat([first, second])], top_k=2)
    assert float(load_balancing_loss([first, second], top_k=2)) == pytest.approx(float(together))


def test_gradient_step_makes_the_preferred_expert_less_likely() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0]], requires_grad=True)
    load_balancing_loss([logits], top_k=1).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()
