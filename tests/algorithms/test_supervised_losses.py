"""Loss functions for the offline stages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.supervised_losses import log_sigmoid, soft_cross_entropy, token_nll
from tests.reference import supervised, tokens

rewards = st.floats(-50, 50)


def test_only_target_tokens_contribute_to_loss_and_gradient() -> None:
    logprobs = torch.tensor([[-0.5, -2.0, float("nan")]], requires_grad=True)
    loss = token_nll(logprobs, torch.tensor([[False, True, False]]))
    loss.sum().backward()
    assert loss.tolist() == [[0.0, 2.0, 0.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]


def test_loss_without_targets_is_a_differentiable_zero() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    token_nll(logprobs, torch.tensor([False, False])).sum().backward()
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


def test_token_nll_matches_softmax_and_passes_gradcheck() -> None:
    logits = torch.randn(
        6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    targets, mask = (
        torch.tensor([0, 4, 2, 2, 1, 3]),
        torch.tensor([True, True, False, True, False, True]),
    )

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return token_nll(logits.log_softmax(1).gather(1, targets[:, None])[:, 0], mask)

    rows = zip(logits.tolist(), targets.tolist(), mask.tolist(), strict=True)
    assert loss(logits).tolist() == pytest.approx(
        [-tokens.token_logprob(row, y) if m else 0.0 for row, y, m in rows]
    )
    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("best", [None, 2])
def test_distillation_loss_passes_gradcheck(best: int | None) -> None:
    """The loss also equals an explicit sum over the teacher's tokens.

    The teacher's top-k probabilities are renormalized to sum to 1.
    """
    draw = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 4, 6, dtype=torch.float64, generator=draw)
    kept = teacher.topk(best or 6)
    arguments = (teacher,) if best is None else (kept.values, kept.indices)
    losses = soft_cross_entropy(logits, *arguments).tolist()
    for row, (values, chosen) in enumerate(
        zip(kept.values.tolist(), kept.indices.tolist(), strict=True)
    ):
        total = sum(math.exp(value) for value in values)
        shares = [math.exp(value) / total for value in values]
        logprobs = [tokens.token_logprob(logits[row].tolist(), token) for token in chosen]
        expected = -sum(share * logprob for share, logprob in zip(shares, logprobs, strict=True))
        assert losses[row] == pytest.approx(expected)
    assert torch.autograd.gradcheck(
        lambda x: soft_cross_entropy(x, *arguments), (logits.requires_grad_(),)
    )


def test_pairwise_loss_matches_a_worked_example() -> None:
    """Equal rewards give log 2. A chosen reward that is higher by log 3 gives −log(¾)."""
    chosen, rejected = torch.tensor([1.0, math.log(3.0)]), torch.tensor([1.0, 0.0])
    assert log_sigmoid(chosen, rejected).tolist() == pytest.approx([math.log(2), math.log(4 / 3)])


def test_pairwise_loss_types_are_equal_and_the_margin_shifts_the_difference() -> None:
    """The loss types `sigmoid` and `logexp` are equal: −log σ(x) = log(1 + exp(−x))."""
    chosen, rejected = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(log_sigmoid(chosen, rejected), (1 + (rejected - chosen).exp()).log())
    margin = torch.full((50,), 0.7)
    assert torch.allclose(
        log_sigmoid(chosen, rejected, margin), log_sigmoid(chosen - 0.7, rejected)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairwise_loss_is_finite_for_any_difference(dtype: torch.dtype) -> None:
    chosen = torch.tensor([-1e4, 0.0, 1e4], dtype=dtype, requires_grad=True)
    loss = log_sigmoid(chosen, torch.zeros(3, dtype=dtype))
    loss.sum().backward()
    expected = [float(torch.tensor(1e4, dtype=dtype)), math.log(2), 0.0]
    assert loss.tolist() == pytest.approx(expected, rel=4e-3)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-1.0, -0.5, 0.0])


def test_pairwise_loss_passes_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: log_sigmoid(p[0], p[1]), (pairs,))
    assert torch.autograd.gradcheck(
        lambda p: log_sigmoid(p[0], p[1], torch.ones(5).double()), (pairs,)
    )


@given(chosen=rewards, rejected=rewards, margin=st.floats(0, 5), shift=rewards)
def test_pairwise_loss_matches_the_reference_and_depends_only_on_differences(
    chosen: float, rejected: float, margin: float, shift: float
) -> None:
    def loss(moved: float, margin: float | None) -> float:
        pair = (
            torch.tensor([reward + moved], dtype=torch.float64) for reward in (chosen, rejected)
        )
        return log_sigmoid(
            *pair, None if margin is None else torch.tensor([margin], dtype=torch.float64)
        ).item()

    assert loss(0.0, None) == pytest.approx(supervised.pairwise(chosen, rejected), abs=1e-12)
    assert loss(shift, None) == pytest.approx(loss(0.0, None), abs=1e-12)
    assert loss(0.0, margin) == pytest.approx(
        supervised.pairwise(chosen, rejected, margin), abs=1e-12
    )


@pytest.mark.parametrize("top_k", [False, True])
def test_token_excluded_by_teacher_and_student_adds_no_loss(top_k: bool) -> None:
    """Vocabulary padding is one example of an excluded token.

    The loss equals the loss over the remaining tokens, and the gradient is finite.
    """
    teacher = torch.tensor([[0.5, -torch.inf, 1.5, -0.5]], dtype=torch.float64)
    logits = torch.tensor([[1.0, -torch.inf, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    loss = soft_cross_entropy(logits, teacher, torch.arange(4)[None] if top_k else None)
    kept = [0, 2, 3]
    torch.testing.assert_close(loss, soft_cross_entropy(logits[:, kept], teacher[:, kept]))
    loss.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_token_excluded_only_by_the_student_has_infinite_loss() -> None:
    assert soft_cross_entropy(torch.tensor([[0.0, -torch.inf]]), torch.zeros(1, 2)).isinf().all()
