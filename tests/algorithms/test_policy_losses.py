"""Policy and value losses, and their aggregation weights."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.corrections import Correction, correction_weights
from openrlhf.algorithms.policy_losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    Clip,
    PolicyLoss,
    aggregation_weights,
    value_loss,
)
from openrlhf.config.algorithm import LossConfig
from tests.reference import policy

LOSSES = ["ppo", "gspo", "cispo"]
KINDS = ["token", "sequence", "constant"]
ASYMMETRIC: dict[str, Any] = {"low": 0.2, "high": 0.28}
Block = tuple[Tensor, ...]


def random_block(spread: float = 0.5, rows: int = 6, width: int = 9) -> Block:
    """Draw float64 log π_θ, log π_old and Â, and a mask with gaps, an empty row and a full row."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, dtype=torch.float64, generator=generator) - 0.5
    logprobs = old + spread * torch.randn(rows, width, dtype=torch.float64, generator=generator)
    advantages = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0], mask[1] = False, True
    return logprobs, old, advantages, mask


def loss_of(name: str, block: Block, **clip: Any) -> PolicyLoss:
    return POLICY_LOSSES[name](*block, Clip(**ASYMMETRIC | clip))


def one_token(ratio: float, advantage: float, name: str = "ppo", **clip: Any) -> PolicyLoss:
    """Return the loss of one token with the given ratio and advantage; log π_old is −1."""
    logprobs = torch.tensor([[math.log(ratio) - 1]], dtype=torch.float64)
    old, mask = torch.full_like(logprobs, -1.0), torch.ones(1, 1, dtype=torch.bool)
    return loss_of(name, (logprobs, old, torch.full_like(old, advantage), mask), **clip)


def gradient(name: str, block: Block, **clip: Any) -> Tensor:
    """Return ∂ Σ ℓ / ∂ log π_θ."""
    logprobs = block[0].clone().requires_grad_()
    (result,) = torch.autograd.grad(
        loss_of(name, (logprobs, *block[1:]), **clip).per_token.sum(), logprobs
    )
    return result


# Values


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected", "clipped"),
    [
        (1.1, 2.0, None, -2.2, False),  # inside the range
        (1.5, 2.0, None, -2.56, True),  # the gain is capped at a ratio of 1.28
        (0.5, 2.0, None, -1.0, False),  # Â > 0 and a smaller ratio: not clipped
        (0.5, -2.0, None, 1.6, True),  # the loss is capped at a ratio of 0.8
        (1.5, -2.0, None, 3.0, False),  # Â < 0 and a larger ratio: not clipped
        (9.0, -2.0, None, 18.0, False),
        (9.0, -2.0, 3.0, 6.0, False),  # the dual clip bounds the loss for Â < 0
        (9.0, 2.0, 3.0, -2.56, True),  # the dual clip does not apply for Â > 0
        (1.0, 0.0, None, 0.0, False),
    ],
)
def test_clipped_surrogate_loss_matches_a_worked_example(
    ratio: float, advantage: float, dual_clip: float | None, expected: float, clipped: bool
) -> None:
    loss = one_token(ratio, advantage, dual=dual_clip)
    assert loss.per_token.item() == pytest.approx(expected)
    assert loss.clipped.item() is clipped
    assert loss.approx_kl.item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize(
    ("ratio", "clip_low", "expected", "clipped"),
    [
        (1.1, 1.0, 1.1, False),
        (1.5, 1.0, 1.28, True),
        (0.01, 1.0, 0.01, False),  # ε_low = 1 disables the lower bound
        (0.5, 0.2, 0.8, True),
    ],
)
def test_cispo_weights_the_log_probability_by_the_clipped_ratio(
    ratio: float, clip_low: float, expected: float, clipped: bool
) -> None:
    """Â = 2 and log π = log ratio − 1, so ℓ = −weight · 2 · (log ratio − 1)."""
    loss = one_token(ratio, 2.0, "cispo", low=clip_low)
    assert loss.per_token.item() == pytest.approx(-expected * 2.0 * (math.log(ratio) - 1))
    assert loss.clipped.item() is clipped


def test_gspo_uses_one_ratio_per_sequence() -> None:
    """The log-ratios 0.3 and −0.1 have mean 0.1, and the token outside the mask has no effect."""
    old = torch.zeros(1, 3)
    mask = torch.tensor([[True, True, False]])
    loss = loss_of("gspo", (torch.tensor([[0.3, -0.1, 5.0]]), old, torch.ones(1, 3), mask))
    assert loss.per_token.tolist()[0] == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0.0])
    assert loss.approx_kl.tolist()[0] == pytest.approx([-0.3, 0.1, 0.0]), "per token nonetheless"


def test_gspo_equals_ppo_for_single_token_sequences() -> None:
    logprobs, old, advantages, _ = random_block()
    single = torch.zeros_like(logprobs, dtype=torch.bool)
    single[:, 3] = True
    block = (logprobs, old, advantages, single)
    assert torch.allclose(loss_of("gspo", block).per_token, loss_of("ppo", block).per_token)


@pytest.mark.parametrize(
    ("name", "dual_clip"),
    [("ppo", None), ("ppo", 1.5), ("gspo", None), ("gspo", 1.5), ("cispo", None)],
)
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_policy_losses_match_the_reference(
    name: str, dual_clip: float | None, spread: float
) -> None:
    block = random_block(spread)
    loss = loss_of(name, block, dual=dual_clip)
    reference = {"ppo": policy.ppo, "gspo": policy.gspo, "cispo": policy.cispo}[name]
    for row, per_token in enumerate(loss.per_token.tolist()):
        logprobs, old, advantages, mask = (x[row].tolist() for x in block)
        assert per_token == pytest.approx(
            reference(logprobs, old, advantages, mask, 0.2, 0.28, dual_clip)
        )


# Gradients


@pytest.mark.parametrize("name", LOSSES)
def test_surrogate_gradient_equals_reinforce_at_ratio_1(name: str) -> None:
    """The gradient ∂ℓ_t / ∂ log π_t is −Â_t; for GSPO, the gradient is the mean over the sequence.

    In GSPO all tokens of a sequence share one ratio.
    """
    _, old, advantages, mask = random_block()
    expected = -advantages.masked_fill(~mask, 0)
    if name == "gspo":
        expected = (expected.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)) * mask
    assert torch.allclose(gradient(name, (old, old, advantages, mask)), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_get_no_gradient(name: str) -> None:
    block = random_block()
    mask = block[3]
    result = gradient(name, block)
    assert not result[~mask].any()
    assert result[mask].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_values_outside_the_mask_are_ignored(name: str, garbage: float) -> None:
    *columns, mask = random_block()
    dirty = (*(x.masked_fill(~mask, garbage) for x in columns), mask)
    clean = (*columns, mask)
    assert torch.equal(gradient(name, dirty), gradient(name, clean))
    for field in fields(PolicyLoss):
        assert torch.equal(
            getattr(loss_of(name, dirty), field.name), getattr(loss_of(name, clean), field.name)
        )
        assert not getattr(loss_of(name, dirty), field.name)[~mask].any()


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_surrogate_loss_passes_gradcheck(name: str) -> None:
    logprobs, *rest = random_block()

    def total(logprobs: Tensor) -> Tensor:
        return loss_of(name, (logprobs, *rest), dual=3.0).per_token

    assert torch.autograd.gradcheck(total, (logprobs.requires_grad_(),))


def test_clipped_tokens_have_a_gradient_in_cispo_but_not_in_ppo() -> None:
    block = random_block(spread=1.0)
    clipped = loss_of("ppo", block).clipped
    assert clipped.any()
    assert not gradient("ppo", block)[clipped].any()
    assert gradient("cispo", block)[clipped].all()


def test_cispo_gradient_is_minus_the_weight_times_the_advantage() -> None:
    block = random_block(spread=1.0)
    weight = (block[0] - block[1]).exp().clamp(0.8, 1.28)
    expected = (-weight * block[2]).masked_fill(~block[3], 0)
    assert torch.allclose(gradient("cispo", block), expected)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_losses_and_gradients_stay_finite_for_extreme_log_ratios(
    name: str, difference: float
) -> None:
    old = torch.full((2, 4), -2e4)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
    block = (old + difference, old, advantages, torch.ones(2, 4, dtype=torch.bool))
    loss = loss_of(name, block)
    assert loss.per_token.isfinite().all()
    assert gradient(name, block).isfinite().all()
    assert loss.approx_kl[0, 0].item() == -difference, "reported as it is"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_with_an_empty_mask_is_a_differentiable_zero(name: str, kind: str) -> None:
    """No loss, aggregation or correction computes 0 · NaN from a value outside the mask."""
    blank = torch.full((3, 4), math.nan)
    logprobs, empty = blank.clone().requires_grad_(), torch.zeros(3, 4, dtype=torch.bool)
    weights, count = aggregation_weights(empty, kind, max_tokens=9)
    correction = Correction(gating="binary_kl", level="seq", mode="mask", low=0.0, high=2.0)
    corrected, _ = correction_weights(blank, blank, empty, correction)
    loss = (weights * corrected * loss_of(name, (logprobs, blank, blank, empty)).per_token).sum()
    loss.backward()
    assert (loss.item(), count) == (0.0, 0.0)
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data())
def test_policy_losses_do_not_depend_on_order_or_padding(name: str, data: st.DataObject) -> None:
    block = random_block()
    rows, width = block[0].shape
    row_order, token_order = (data.draw(st.permutations(range(n))) for n in (rows, width))
    left, right = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    moved = tuple(
        torch.nn.functional.pad(x[row_order][:, token_order], (left, right)) for x in block
    )
    expected = loss_of(name, block).per_token[row_order][:, token_order]
    assert torch.allclose(
        loss_of(name, moved).per_token[:, left : left + width], expected, rtol=1e-12
    )


@pytest.mark.parametrize("name", LOSSES)
@given(factor=st.floats(0, 100))
def test_policy_losses_scale_with_the_advantages(name: str, factor: float) -> None:
    logprobs, old, advantages, mask = random_block(spread=1.0)
    expected = factor * loss_of(name, (logprobs, old, advantages, mask)).per_token
    assert torch.allclose(
        loss_of(name, (logprobs, old, factor * advantages, mask)).per_token, expected
    )


@given(log_rho=st.floats(-25, 25), advantage=st.floats(-9, 9), bound=st.floats(1.01, 10))
def test_dual_clip_only_bounds_the_loss_of_negative_advantages(
    log_rho: float, advantage: float, bound: float
) -> None:
    free, held = (
        one_token(math.exp(log_rho), advantage, dual=dual).per_token.item()
        for dual in (None, bound)
    )
    assert held == pytest.approx(min(free, -bound * advantage) if advantage < 0 else free)


# Value loss


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (1.3, 2.0, 0.5 * 0.49),  # within ±0.5 of the old value, which is 1
        (2.0, 2.0, 0.5 * 0.25),  # correct but too far from the old value, so clipped to 1.5
        (2.0, 0.0, 0.5 * 4.0),  # wrong and far from the old value, so the error is not clipped
    ],
)
def test_value_loss_matches_a_worked_example(value: float, target: float, expected: float) -> None:
    v, old, goal = (torch.tensor([[x]]) for x in (value, 1.0, target))
    assert value_loss(v, old, goal, torch.tensor([[True]]), clip=0.5).item() == pytest.approx(
        expected
    )


def test_value_loss_matches_the_reference_and_ignores_masked_tokens() -> None:
    values, old, returns, mask = random_block()
    values.requires_grad_()
    nan = float("nan")
    loss = value_loss(values, old, returns.masked_fill(~mask, nan), mask, clip=0.2)
    points = zip(*(x[mask].tolist() for x in (loss, values, old, returns)), strict=True)
    for actual, v, v_old, target in points:
        assert actual == pytest.approx(policy.value(v, v_old, target, 0.2))
    loss.sum().backward()
    assert values.grad is not None
    assert not values.grad[~mask].any()
    assert not loss[~mask].any()


def test_value_loss_passes_gradcheck() -> None:
    values, old, returns, mask = random_block(spread=1.0)
    plain_error = 0.5 * (values - returns).square() * mask
    held = value_loss(values, old, returns, mask, clip=0.2) > plain_error + 1e-9
    assert held.any() and (~held & mask).any()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, clip=0.2), (values.requires_grad_(),)
    )
    (gradient,) = torch.autograd.grad(
        value_loss(values, old, returns, mask, clip=0.2).sum(), values
    )
    assert not gradient[held].any(), "a value that its clip holds is not pulled further"


def test_value_loss_with_an_empty_mask_is_a_differentiable_zero() -> None:
    blank = torch.full((2, 3), math.nan)
    values = blank.clone().requires_grad_()
    loss = value_loss(values, blank, blank, torch.zeros(2, 3, dtype=torch.bool), clip=0.2)
    loss.sum().backward()
    assert values.grad is not None
    assert not values.grad.any() and not loss.any()


def test_value_loss_with_infinite_clip_is_the_squared_error() -> None:
    values, old, returns, mask = random_block()
    loss = value_loss(values, old, returns, mask, clip=math.inf)
    assert torch.allclose(loss, 0.5 * (values - returns).square() * mask)


# Aggregation


@pytest.mark.parametrize(
    ("kind", "weights", "count"),
    [
        ("token", [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], 3.0),
        ("sequence", [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], 2.0),
        ("constant", [[0.25, 0.25, 0.0], [0.0, 0.25, 0.0], [0.0, 0.0, 0.0]], 2.0),
    ],
)
def test_aggregation_weights_match_a_worked_example(
    kind: str, weights: list[list[float]], count: float
) -> None:
    mask = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
    actual = aggregation_weights(mask, kind, max_tokens=4)
    assert actual[0].tolist() == weights
    assert actual[1] == count


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25)
@given(parts=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_loss_and_gradient_do_not_depend_on_the_micro_batch_split(
    name: str, kind: str, corrected: bool, parts: list[int]
) -> None:
    """Rows are distributed arbitrarily over four micro-batches, some of which may be empty.

    `parts[i]` is the index of the micro-batch that contains row i.
    """
    logprobs, old, advantages, mask = random_block()
    logprobs.requires_grad_()
    rollout = old + 0.5 * torch.randn(
        old.shape, dtype=old.dtype, generator=torch.Generator().manual_seed(2)
    )
    correction = Correction(gating="ratio", level="seq", mode="mask", low=0.8, high=1.25)

    def share(rows: list[int]) -> tuple[Tensor, Tensor, float]:
        """Return the rows' per-token loss terms, the weighted sum of the terms, and the count."""
        terms = loss_of(name, (logprobs[rows], old[rows], advantages[rows], mask[rows])).per_token
        if corrected:
            terms = terms * correction_weights(old[rows], rollout[rows], mask[rows], correction)[0]
        weights, count = aggregation_weights(mask[rows], kind, max_tokens=9)
        return terms, (weights * terms).sum(), count

    terms, whole, count = share(list(range(6)))
    pieces = [share([row for row in range(6) if parts[row] == part]) for part in range(4)]
    total, counts = (
        torch.stack([piece[1] for piece in pieces]).sum(),
        sum(piece[2] for piece in pieces),
    )
    assert counts == count
    split, at_once = (
        torch.autograd.grad(loss / count, logprobs, retain_graph=True)[0] for loss in (total, whole)
    )
    assert torch.allclose(split, at_once, atol=1e-12)
    expected = policy.aggregate(terms.tolist(), mask.tolist(), kind, 9)
    assert (total / counts).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_row_without_actions_is_not_counted(kind: str) -> None:
    mask = random_block()[3]
    assert not mask[0].any()
    assert (
        aggregation_weights(mask, kind, max_tokens=9)[1]
        == aggregation_weights(mask[1:], kind, max_tokens=9)[1]
    )


def test_every_aggregation_is_a_choice_of_its_flag() -> None:
    """The choices are fixed: a plug-in can add a policy loss, but not an aggregation."""
    assert list(AGGREGATIONS) == KINDS
    for kind in KINDS:
        LossConfig(aggregation=kind)


def test_unknown_name_raises_an_error_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'grpo'.* ppo, gspo, cispo"):
        _ = POLICY_LOSSES["grpo"]
