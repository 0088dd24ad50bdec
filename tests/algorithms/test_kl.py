"""KL estimators and the KL coefficient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.kl import (
    KL_ESTIMATORS,
    KLController,
    kl_clamped,
    kl_estimate,
    unbiased_kl_estimate,
)
from tests.reference import policy

ESTIMATORS = ["k1", "k2", "k3"]


def exact_kl_gradient(
    estimator: str, *, forward: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Σ_a π(a) ∇ k(a), ∇ KL(π‖π_ref) or ∇ KL(π_ref‖π)) with respect to π's logits.

    All five actions are enumerated.
    """
    logits = torch.tensor([0.3, -1.0, 0.7, 0.0, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.5, -0.4, 0.0, 0.9], dtype=torch.float64).log_softmax(0)
    policy_logprobs = logits.log_softmax(0)
    sampled = policy_logprobs.exp().detach() * kl_estimate(policy_logprobs, reference, estimator)
    gap = policy_logprobs - reference
    true_kl = -(reference.exp() * gap).sum() if forward else (policy_logprobs.exp() * gap).sum()
    (of_samples,) = torch.autograd.grad(sampled.sum(), logits, retain_graph=True)
    (of_kl,) = torch.autograd.grad(true_kl, logits)
    return of_samples, of_kl


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_kl_estimates_of_half_a_nat_match_a_worked_example(estimator: str, expected: float) -> None:
    assert kl_estimate(
        torch.tensor([-1.0]), torch.tensor([-1.5]), estimator
    ).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimates_match_the_reference(estimator: str) -> None:
    x = torch.linspace(-30, 30, 241, dtype=torch.float64)
    expected = [policy.kl(value, estimator) for value in x.tolist()]
    assert kl_estimate(x, torch.zeros_like(x), estimator).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    policy_logprobs = torch.tensor([0.3, -1.0, 0.7]).double().log_softmax(0)
    reference = torch.tensor([0.1, 0.5, -0.4]).double().log_softmax(0)
    expectation = policy_logprobs.exp() @ kl_estimate(policy_logprobs, reference, estimator)
    assert expectation.item() == pytest.approx(
        (policy_logprobs.exp() @ (policy_logprobs - reference)).item()
    )


def test_k1_as_a_loss_has_zero_expected_gradient() -> None:
    of_samples, _ = exact_kl_gradient("k1")
    assert torch.allclose(of_samples, torch.zeros_like(of_samples), atol=1e-12)


def test_k2_as_a_loss_has_the_gradient_of_the_kl() -> None:
    assert torch.allclose(*exact_kl_gradient("k2"))


def test_k3_as_a_loss_has_the_gradient_of_the_kl_from_reference_to_policy() -> None:
    assert torch.allclose(*exact_kl_gradient("k3", forward=True))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(estimator: str) -> None:
    x = torch.linspace(-40, 40, 999)
    assert (kl_estimate(x, torch.zeros_like(x), estimator) >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("x", [-1e30, -1e4, -50.0, -2.7, 0.0, 12.0, 50.0, 1e4, 1e30])
def test_kl_estimate_and_gradient_are_finite_for_any_log_ratio(estimator: str, x: float) -> None:
    logprobs = torch.tensor([x], requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1), estimator)
    kl.backward()
    assert abs(kl.item()) <= 10
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimates_pass_gradcheck(estimator: str) -> None:
    """The points lie inside, at and beyond the bounds (±20 nats on the input, ±10 on the estimate).

    Beyond the bounds the gradient is zero.
    """
    logprobs = torch.tensor(
        [-30.0, -15.0, -3.0, -2.5, -0.1, 0.0, 0.4, 4.0, 15.0, 30.0], dtype=torch.float64
    )
    reference = torch.linspace(-1, 1, 10, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: kl_estimate(x, reference, estimator), ((logprobs + reference).requires_grad_(),)
    )


def test_clipped_kl_estimate_has_no_gradient() -> None:
    x = torch.tensor([-2.6, -2.7], requires_grad=True)
    kl_estimate(x, torch.zeros(2), "k3").sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([1 - math.exp(2.6), 0.0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(x=st.floats(-30, 30), shift=st.integers(-64, 64).map(float))
def test_kl_estimate_depends_only_on_the_log_ratio(estimator: str, x: float, shift: float) -> None:
    at_zero, moved = (
        kl_estimate(*torch.tensor([[x + s], [s]], dtype=torch.float64), estimator)
        for s in (0.0, shift)
    )
    assert moved.item() == pytest.approx(at_zero.item(), abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unbiased_kl_matches_the_float64_loop_in_value_and_gradient(estimator: str) -> None:
    logprobs = torch.linspace(-8, -0.1, 40, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    old, reference = logprobs.detach() + 2 * torch.randn(
        2, 40, dtype=torch.float64, generator=generator
    )
    kl = unbiased_kl_estimate(logprobs, old, reference, estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    columns = zip(logprobs.tolist(), old.tolist(), reference.tolist(), strict=True)
    expected = [policy.unbiased_kl(new, before, ref, estimator) for new, before, ref in columns]
    assert kl.tolist() == pytest.approx([value for value, _ in expected])
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected])
    weights = (logprobs.detach() - old).exp()
    assert (weights > 10).any() and (weights < 1).any()


def test_unbiased_kl_has_the_same_gradient_for_all_estimators_even_where_clipped() -> None:
    logprobs = torch.linspace(-30, 30, 61, dtype=torch.float64, requires_grad=True)
    old, reference = logprobs.detach() - 0.5, torch.zeros_like(logprobs)
    gradients = [
        torch.autograd.grad(unbiased_kl_estimate(logprobs, old, reference, name).sum(), logprobs)[0]
        for name in ESTIMATORS
    ]
    assert gradients[0].equal(gradients[1]) and gradients[0].equal(gradients[2])
    torch.testing.assert_close(gradients[0], math.exp(0.5) * logprobs.detach())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unbiased_kl_has_the_gradient_of_the_kl_on_samples_of_the_old_policy(
    estimator: str,
) -> None:
    """All five actions are enumerated."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.0, 0.2], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, -0.2, 0.4, 0.3, -0.5], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([0.1, 0.5, -0.4, 0.0, 0.9], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    sampled = old.exp() * unbiased_kl_estimate(logprobs, old, reference, estimator)
    true_kl = (logprobs.exp() * (logprobs - reference)).sum()
    (of_samples,) = torch.autograd.grad(sampled.sum(), logits, retain_graph=True)
    (of_kl,) = torch.autograd.grad(true_kl, logits)
    torch.testing.assert_close(of_samples, of_kl)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unbiased_kl_value_equals_the_estimate_in_float32(estimator: str) -> None:
    logprobs = torch.linspace(-120, 0, 50, requires_grad=True)
    old, reference = torch.full((50,), -3.0), torch.full((50,), -1.0)
    unbiased = unbiased_kl_estimate(logprobs, old, reference, estimator)
    assert unbiased.equal(kl_estimate(logprobs, reference, estimator))


def test_tokens_with_a_clipped_kl_estimate_are_counted() -> None:
    """exp(2.6) − 1 − 2.6 = 9.86 is below the limit of 10; exp(2.7) − 1 − 2.7 = 11.2 is above."""
    kl = kl_estimate(torch.tensor([-2.6, -2.7, 0.0, 50.0]), torch.zeros(4), "k3")
    assert kl_clamped(kl).tolist() == [False, True, False, True]


def test_unknown_kl_estimator_raises_an_error_with_the_known_names() -> None:
    assert list(KL_ESTIMATORS) == ESTIMATORS
    with pytest.raises(ValueError, match=r"'k4'.* k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


# The coefficient


def test_fixed_kl_coefficient_ignores_the_kl_and_the_checkpoint() -> None:
    controller = KLController(0.01)
    controller.update(100.0, 1000)
    controller.resume(0.5, 100.0)
    assert controller.coef == 0.01


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 100 / 10_000)),
        (60.0, 0.1 * (1 + 0.2 * 100 / 10_000)),  # the error is clipped to 0.2
        (0.0, 0.1 * (1 - 0.2 * 100 / 10_000)),
    ],
)
def test_adaptive_kl_coefficient_matches_a_worked_example(kl: float, expected: float) -> None:
    controller = KLController(0.1, target=6.0, horizon=10_000)
    controller.update(kl, 100)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


@given(measured=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3000)), max_size=20))
def test_adaptive_kl_coefficient_matches_the_reference(measured: list[tuple[float, int]]) -> None:
    controller, path = KLController(0.1, target=6.0, horizon=1000), []
    for kl, n in measured:
        controller.update(kl, n)
        path.append(controller.coef)
    assert path == pytest.approx(policy.adaptive_coefficients(0.1, measured, 6.0, 1000))
    assert all(coef > 0 for coef in path)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_nonfinite_kl_does_not_change_the_coefficient(kl: float) -> None:
    controller = KLController(0.1, target=6.0, horizon=10_000)
    controller.update(kl, 100)
    assert controller.coef == 0.1


def test_adaptive_kl_coefficient_is_restored_from_a_checkpoint() -> None:
    first = KLController(0.1, target=6.0, horizon=10_000)
    first.update(20.0, 100)
    second = KLController(0.1, target=6.0, horizon=10_000)
    second.resume(first.coef, first.last)
    assert second.coef == first.coef != 0.1
    assert second.last == 20.0


def test_adaptive_kl_coefficient_stays_positive_for_batches_larger_than_the_horizon() -> None:
    controller = KLController(0.1, target=6.0, horizon=100)
    controller.update(0.0, 1_000_000)
    assert controller.coef == pytest.approx(0.1 * 0.8)
