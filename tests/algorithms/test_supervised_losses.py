"""Losses of the offline stages."""

import math

import pytest
import torch

from openrlhf.algorithms.supervised_losses import PAIRWISE_LOSSES, log_exp, log_sigmoid, token_nll


def test_only_targets_have_a_loss_and_a_gradient() -> None:
    logprobs = torch.tensor([[-0.5, -2.0, float("nan")]], requires_grad=True)
    loss = token_nll(logprobs, torch.tensor([[False, True, False]]))
    loss.sum().backward()
    assert loss.tolist() == [[0.0, 2.0, 0.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]


def test_a_batch_without_targets_is_a_differentiable_zero() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    token_nll(logprobs, torch.tensor([False, False])).sum().backward()
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


def test_the_pairwise_loss_by_hand() -> None:
    """Equal rewards: log 2. Chosen better by log 3: −log(¾)."""
    chosen, rejected = torch.tensor([1.0, math.log(3.0)]), torch.tensor([1.0, 0.0])
    assert log_sigmoid(chosen, rejected).tolist() == pytest.approx([math.log(2), math.log(4 / 3)])


def test_both_names_agree_and_only_one_knows_a_margin() -> None:
    chosen, rejected = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    margin = torch.full((50,), 0.7)
    assert torch.equal(log_exp(chosen, rejected), log_sigmoid(chosen, rejected))
    assert torch.equal(log_exp(chosen, rejected, margin), log_sigmoid(chosen, rejected))
    assert torch.allclose(log_sigmoid(chosen, rejected, margin), log_sigmoid(chosen - 0.7, rejected))


@pytest.mark.parametrize("name", list(PAIRWISE_LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairwise_losses_are_finite_at_any_distance(name: str, dtype: torch.dtype) -> None:
    chosen = torch.tensor([-1e4, 0.0, 1e4], dtype=dtype, requires_grad=True)
    loss = PAIRWISE_LOSSES[name](chosen, torch.zeros(3, dtype=dtype), None)
    loss.sum().backward()
    expected = [float(torch.tensor(1e4, dtype=dtype)), math.log(2), 0.0]
    assert loss.tolist() == pytest.approx(expected, rel=4e-3)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-1.0, -0.5, 0.0])


@pytest.mark.parametrize("name", list(PAIRWISE_LOSSES))
def test_pairwise_losses_have_the_gradient_of_their_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: PAIRWISE_LOSSES[name](p[0], p[1], None), (pairs,))
