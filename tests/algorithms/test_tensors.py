"""Masked statistics, and log-probabilities and entropies from hidden states."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms import tensors
from openrlhf.algorithms.tensors import (
    bounded_exp,
    linear_logprobs,
    log_ratio,
    logit_logprobs,
    masked_sum,
    masked_whiten,
)
from tests.allocations import LargestTensor
from tests.reference import credit, tokens

NAN = float("nan")


def head_inputs(rows: int = 7, width: int = 3, vocabulary: int = 5) -> tuple[Tensor, ...]:
    """Return hidden states, head weight, bias and targets in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(vocabulary, dtype=torch.float64, generator=generator)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    return hidden, weight, bias, targets


# Masked statistics


def test_values_outside_the_mask_affect_neither_sum_nor_gradient() -> None:
    x = torch.tensor([[1.0, NAN, math.inf]], requires_grad=True)
    total = masked_sum(x, torch.tensor([[True, False, False]]))
    total.backward()
    assert total.item() == 1.0
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_sum_over_an_empty_mask_is_a_differentiable_zero() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    total = masked_sum(x, torch.zeros(2, 3, dtype=torch.bool))
    total.backward()
    assert total.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()


def test_whitening_matches_a_worked_example() -> None:
    """The numbers 1, 2, 3 and 6 have mean 3 and population variance 14/4."""
    x = torch.tensor([[1.0, 2.0, 3.0, NAN], [6.0, NAN, NAN, NAN]])
    mask = ~x.isnan()
    expected = torch.tensor([[-2.0, -1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(masked_whiten(x, mask), expected / math.sqrt(3.5))
    assert torch.equal(masked_whiten(x, mask, scale=False), expected)


@pytest.mark.parametrize("scale", [True, False])
def test_whitening_matches_the_reference(scale: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, generator=generator) * 3 + 5
    mask = torch.rand(40, generator=generator) < 0.6
    expected = credit.whiten(x.tolist(), mask.tolist(), scale)
    assert masked_whiten(x, mask, scale=scale).tolist() == pytest.approx(expected, abs=1e-6)


# Pairs of a number and its mask entry; multiples of ¼ are exact in binary.
masked = st.lists(
    st.tuples(st.integers(-40, 40).map(lambda n: n / 4), st.booleans()), min_size=1, max_size=20
)


@given(
    entries=masked, shift=st.integers(-40, 40), factor=st.sampled_from([0.5, 8.0]), data=st.data()
)
def test_whitened_values_have_mean_zero_and_variance_one(
    entries: list[tuple[float, bool]], shift: int, factor: float, data: st.DataObject
) -> None:
    x, mask = (
        torch.tensor([v for v, _ in entries]).double(),
        torch.tensor([wanted for _, wanted in entries]),
    )
    white = masked_whiten(x, mask)
    assert not white[~mask].any()
    if len(set(x[mask].tolist())) > 1:
        assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
        assert white[mask].square().mean().item() == pytest.approx(1.0)
    else:
        assert not white.any()
    order = data.draw(st.permutations(range(len(entries))))
    assert torch.allclose(
        masked_whiten((x * factor + shift)[order], mask[order]), white[order], atol=1e-9
    )


def test_whitening_applies_the_minimum_variance() -> None:
    """Two values 2e-5 apart have variance 1e-10; a variance of 1e-8 gives ±0.1 instead of ±1."""
    x = torch.tensor([0.0, 2e-5])
    assert torch.allclose(
        masked_whiten(x, torch.ones(2, dtype=torch.bool)), torch.tensor([-0.1, 0.1])
    )


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, -1 / 3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_are_whitened_to_exactly_zero(value: float, dtype: torch.dtype) -> None:
    x = torch.full((1000,), value, dtype=dtype)
    assert not masked_whiten(x, torch.ones(1000, dtype=torch.bool)).any()


def test_whitening_over_an_empty_mask_returns_zeros() -> None:
    assert not masked_whiten(torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)).any()
    assert masked_whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).shape == (0,)


def test_log_ratio_is_zero_outside_the_mask_even_for_nan() -> None:
    mask = torch.tensor([True, False, False])
    ratio = log_ratio(
        torch.tensor([-1.0, NAN, -math.inf]), torch.tensor([-3.0, 0.0, -math.inf]), mask
    )
    assert ratio.tolist() == [2.0, 0.0, 0.0]


def test_bounded_exp_is_finite_and_constant_beyond_its_bounds() -> None:
    x = torch.tensor([-1e4, 0.0, 20.0, 1e4, math.inf], requires_grad=True)
    y = bounded_exp(x)
    y.sum().backward()
    bound = math.exp(20.0)
    assert y.tolist() == pytest.approx([math.exp(-20.0), 1.0, bound, bound, bound])
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.0, 1.0, bound, 0.0, 0.0])


# Log-probabilities and entropies


def test_two_equal_logits_have_probability_one_half() -> None:
    logits = torch.tensor([[3.0, 3.0], [0.0, math.log(3.0)]])
    logprobs, _ = logit_logprobs(logits, torch.tensor([0, 1]))
    assert logprobs.tolist() == pytest.approx([math.log(1 / 2), math.log(3 / 4)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_and_entropy_match_the_reference(temperature: float) -> None:
    hidden, weight, bias, targets = head_inputs()
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, temperature=temperature, entropy=True, bias=bias
    )
    rows = [tokens.linear(h, weight.tolist(), bias.tolist()) for h in hidden.tolist()]
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([tokens.entropy(row, temperature) for row in rows])
    assert logprobs.tolist() == pytest.approx(
        [
            tokens.token_logprob(row, y, temperature)
            for row, y in zip(rows, targets.tolist(), strict=True)
        ]
    )
    of_logits = logit_logprobs(
        hidden @ weight.t() + bias, targets, temperature=temperature, entropy=True
    )
    assert of_logits[1] is not None
    assert torch.allclose(of_logits[0], logprobs) and torch.allclose(of_logits[1], entropy)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_and_entropy_describe_the_same_distribution(temperature: float) -> None:
    """Probabilities over all tokens sum to 1, and the mean of −log π under π is the entropy.

    Both identities hold at every temperature.
    """
    hidden, weight, bias, _ = head_inputs(rows=4)
    every = torch.arange(5)
    for state in hidden:
        logprobs, entropy = linear_logprobs(
            state.expand(5, -1), weight, every, temperature=temperature, entropy=True, bias=bias
        )
        assert entropy is not None
        assert logprobs.exp().sum().item() == pytest.approx(1.0)
        assert entropy.tolist() == pytest.approx([-(logprobs.exp() @ logprobs).item()] * 5)


@given(shift=st.integers(-64, 64), temperature=st.floats(0.1, 3))
def test_logprobs_ignore_a_constant_added_to_the_logits(shift: int, temperature: float) -> None:
    hidden, weight, bias, targets = head_inputs()
    plain, moved = (
        linear_logprobs(
            hidden, weight, targets, temperature=temperature, entropy=True, bias=bias + s
        )
        for s in (0, shift)
    )
    for before, after in zip(plain, moved, strict=True):
        assert before is not None and after is not None
        assert torch.allclose(before, after, atol=1e-9)


@pytest.mark.parametrize("chunk_logits", [1 << 25, 10, 1], ids=["one chunk", "two rows", "one row"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_pass_gradcheck(
    chunk_logits: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", chunk_logits)
    *inputs, targets = head_inputs()
    hidden, weight, bias = (x.requires_grad_() for x in inputs)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = linear_logprobs(
            hidden, weight, targets, temperature=temperature, entropy=True, bias=bias
        )
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("use", ["logprobs", "entropy"])
def test_logprobs_and_entropy_can_be_differentiated_separately(use: str) -> None:
    hidden, weight, bias, targets = head_inputs()
    hidden.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, entropy=True, bias=bias)
    chosen = logprobs if use == "logprobs" else entropy
    assert chosen is not None
    (actual,) = torch.autograd.grad(chosen.sum(), hidden)
    log_p = (hidden @ weight.t() + bias).log_softmax(1)
    plain = log_p.gather(1, targets[:, None]) if use == "logprobs" else -log_p.exp() * log_p
    (expected,) = torch.autograd.grad(plain.sum(), hidden)
    assert torch.allclose(actual, expected)


def test_inputs_without_requires_grad_get_no_gradient() -> None:
    hidden, weight, _, targets = head_inputs()
    linear_logprobs(hidden.requires_grad_(), weight, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    frozen_hidden = hidden.detach()
    linear_logprobs(frozen_hidden, weight.requires_grad_(), targets)[0].sum().backward()
    assert frozen_hidden.grad is None
    assert weight.grad is not None


def test_bfloat16_states_are_scored_in_float32_and_get_a_bfloat16_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Summing the weight's gradient over 1024 chunks in bfloat16 would cause an error of 4 %."""
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", 256)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(128, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(128, (2048,), generator=generator)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, entropy=True)
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = (hidden @ weight.t()).double().log_softmax(1)
    assert torch.allclose(logprobs.double(), exact.gather(1, targets[:, None])[:, 0], atol=1e-5)
    (logprobs.sum() - entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = (h @ w.t()).log_softmax(1)
    (log_p.gather(1, targets[:, None]).sum() + (log_p.exp() * log_p).sum()).backward()
    for actual, expected in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert expected is not None
        assert (actual.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_finite_for_extreme_logits(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [0.0, 0.0, 1e4]], dtype=dtype)
    identity = torch.eye(3, dtype=dtype)
    states = logits.clone().requires_grad_()
    targets = torch.tensor([1, 0, 2])
    logprobs, entropy = linear_logprobs(
        states, identity, targets, temperature=temperature, entropy=True
    )
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert logprobs.tolist() == pytest.approx(
        [2 * float(logits[0, 1]) / temperature, -math.log(3), 0.0]
    )
    assert entropy.tolist() == pytest.approx([0.0, math.log(3), 0.0], abs=1e-6)
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_entropy_is_finite_if_tokens_have_probability_zero() -> None:
    """A bias of −∞ removes a token from the vocabulary; two equally likely tokens remain."""
    bias = torch.tensor([0.0, 0.0, -math.inf])
    hidden = torch.zeros(1, 2, requires_grad=True)
    logprobs, entropy = linear_logprobs(
        hidden, torch.ones(3, 2), torch.tensor([0]), entropy=True, bias=bias
    )
    assert entropy is not None
    (logprobs.sum() + 5 * entropy.sum()).backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_empty_input_gives_zero_gradients() -> None:
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    logprobs, _ = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_one_chunk_of_logits_is_held_at_a_time(
    temperature: float, with_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is larger than the gradient of the hidden states.

    The input has 64 tokens and a vocabulary of 40, and a chunk has two tokens.
    """
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", 80)
    *inputs, targets = head_inputs(rows=64, width=2, vocabulary=40)
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in inputs)
    with LargestTensor() as largest:
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            targets,
            temperature=temperature,
            entropy=True,
            bias=bias if with_bias else None,
        )
        assert entropy is not None
        (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert largest.numel == 128, "all logits would be 2560"
