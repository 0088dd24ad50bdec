"""Masked statistics over tokens, and chunked log-probabilities and entropies.

Log-probabilities and entropies are computed from one chunk of logits at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

PerToken = Float[Tensor, "B T"]  # position t describes token t
TokenMask = Bool[Tensor, "B T"]
PerRow = Float[Tensor, " B"]  # one value per row of tokens
# An episode with several conversations has one value here, but several rows.
PerEpisode = Float[Tensor, " E"]
GroupIds = Int[Tensor, " E"]  # the same for all samples of a prompt

MIN_VARIANCE = 1e-8
# in nats; exp(20) = 4.9e8 is beyond every clip range and well within float32
LOG_RATIO_BOUND = 20.0
CHUNK_LOGITS = 1 << 25  # logits per chunk: 128 MiB in float32
NEGLIGIBLE_LOGPROB = -1e4  # exp of this is 0 even in float64; avoids 0 · (−inf) in entropies


def masked_sum(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float[Tensor, ""]:
    """Sum x over the mask.

    Values outside the mask, even NaN, affect neither the sum nor the gradient.
    """
    return x.masked_fill(~mask, 0).sum()


@torch.no_grad()
def masked_whiten(
    x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"], *, scale: bool = True
) -> Float[Tensor, "*s"]:
    """Compute (x − μ) / √max(σ², 1e-8) over the mask, zero elsewhere. σ² is the population
    variance.

    `scale=False` returns x − μ. If all values are equal, the result is exactly zero, so that the
    policy never trains on the rounding error of μ divided by a tiny σ.
    """
    selected = x[mask].double()
    if not len(selected):
        return torch.zeros_like(x)
    centered = selected - selected.min()
    centered -= centered.mean()
    if scale:
        centered *= centered.square().mean().clamp(min=MIN_VARIANCE).rsqrt()
    return torch.zeros_like(x).masked_scatter(mask, centered.to(x.dtype))


def log_ratio(
    logprobs: Float[Tensor, "*s"], base_logprobs: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Return logprobs − base_logprobs in nats; zero outside the mask, even for NaN."""
    return (logprobs - base_logprobs).masked_fill(~mask, 0)


def bounded_exp(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return exp(x) with x clipped to ±20 nats.

    The result is always finite. If x is clipped, its gradient is zero.
    """
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def linear_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    bias: Float[Tensor, " V"] | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Return (log p(targets), entropy of p or None) in nats, p = softmax((hidden · weightᵀ + bias)
    / temperature).

    Only one chunk of logits is held at a time; the backward pass recomputes it. The matrix product
    uses its inputs' dtype, as in the inference engine; all later computations use float32 (float64
    for float64 inputs). Both results are differentiable. No gradient is computed for a weight that
    does not require one. `temperature` must be above 0.
    """
    untyped = cast(Any, _LinearScores)
    return untyped.apply(hidden, weight, bias, targets, temperature, entropy)


def linear_reduced(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    reduce: Callable[[Tensor, slice], Tensor],
    *,
    bias: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, "N ..."]:
    """Apply `reduce` to the logits hidden · weightᵀ + bias (k, V) of each chunk of rows.

    `reduce(logits, rows)` gets float32 logits (float64 for float64 inputs) and returns one result
    per row. `reduce` must return the same results when it is called again, because the backward
    pass recomputes each chunk. Gradients flow to the inputs, but not through other tensors that
    `reduce` reads.
    """
    untyped = cast(Any, _ReducedLogits)
    return untyped.apply(hidden, weight, bias, reduce)


def logit_logprobs(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Return the results of `linear_logprobs` for given logits. Unlike with `linear_logprobs`,
    autograd keeps several copies of the logits.
    """
    log_p = _log_softmax(logits, temperature)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    if not entropy:
        return logprobs, None
    bounded = log_p.clamp(min=NEGLIGIBLE_LOGPROB)
    return logprobs, -(bounded.exp() * bounded).sum(1)


def row_chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    """Yield slices of `rows` whose logits each fill one chunk."""
    step = max(1, CHUNK_LOGITS // vocabulary)
    for start in range(0, rows, step):
        yield slice(start, start + step)


class _LinearScores(torch.autograd.Function):
    """Log-probability of each row's target, and entropy.

    With p = softmax(z): ∂ log p_y / ∂z_j = 1[j = y] − p_j and ∂H / ∂z_j = −p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(states.dtype, torch.float32)
        logprobs = states.new_empty(len(targets), dtype=dtype)
        entropy = torch.empty_like(logprobs)
        for rows in row_chunks(len(states), len(weight)):
            logits = F.linear(states[rows], weight, bias)
            logprobs[rows], entropies = logit_logprobs(
                logits, targets[rows], temperature=temperature, entropy=want_entropy
            )
            if entropies is not None:
                entropy[rows] = entropies
        ctx.save_for_backward(states, weight, bias, targets, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that is only logged has no gradient
        return logprobs, entropy if want_entropy else None

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_logprobs = grad_logprobs / ctx.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy / ctx.temperature
        gradients = _LinearGradients(states, weight, bias, weight_needed=ctx.needs_input_grad[1])
        for rows in row_chunks(len(states), len(weight)):
            d_logits = _log_softmax(F.linear(states[rows], weight, bias), ctx.temperature)
            if grad_entropy is None:
                d_logits.exp_().mul_(-grad_logprobs[rows, None])
            else:
                p = d_logits.clamp_(min=NEGLIGIBLE_LOGPROB).exp()
                d_logits.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                d_logits.add_(grad_logprobs[rows, None]).mul_(p).neg_()
            d_logits.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            gradients.add(rows, d_logits)
        # autograd casts to the inputs' dtypes
        return gradients.states, gradients.weight, gradients.bias, None, None, None


class _ReducedLogits(torch.autograd.Function):
    """A function applied to each chunk of logits; autograd computes its gradient chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reduce: Callable[[Tensor, slice], Tensor],
    ) -> Tensor:
        # Even without rows, the result has the shape that `reduce` returns.
        chunks = list(row_chunks(len(states), len(weight))) or [slice(0, 0)]
        reduced: list[Tensor] = []
        for rows in chunks:
            reduced.append(reduce(widened(F.linear(states[rows], weight, bias)), rows))
        ctx.save_for_backward(states, weight, bias)
        ctx.reduce = reduce
        return torch.cat(reduced)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias = ctx.saved_tensors
        gradients = _LinearGradients(states, weight, bias, weight_needed=ctx.needs_input_grad[1])
        for rows in row_chunks(len(states), len(weight)):
            logits = widened(F.linear(states[rows], weight, bias)).requires_grad_()
            with torch.enable_grad():
                reduced = ctx.reduce(logits, rows)
            [d_logits] = torch.autograd.grad(reduced, logits, grad[rows])
            gradients.add(rows, d_logits)
        return gradients.states, gradients.weight, gradients.bias, None


class _LinearGradients:
    """Gradients of a linear layer's inputs and weights, summed chunk by chunk.

    The sums over rows are in float32 (float64 for float64 inputs). A weight gradient that is not
    needed is None.
    """

    def __init__(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, *, weight_needed: bool
    ) -> None:
        dtype = torch.promote_types(states.dtype, torch.float32)
        self.states = torch.empty_like(states)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if weight_needed:
            self.weight = torch.zeros_like(weight, dtype=dtype)
        if bias is not None:
            self.bias = torch.zeros_like(bias, dtype=dtype)
        self._layer = states, weight

    def add(self, rows: slice, d_logits: Tensor) -> None:
        """Add the contribution of these rows, computed from the gradient of their logits (k, V)."""
        states, weight = self._layer
        if self.bias is not None:
            self.bias += d_logits.sum(0)
        d_logits = d_logits.to(states.dtype)
        self.states[rows] = d_logits @ weight
        if self.weight is not None:
            self.weight += d_logits.t() @ states[rows]


def widened(logits: Tensor) -> Tensor:
    """Return the logits in float32 or float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return a new (rows, V) block of log-probabilities in float32 or float64."""
    logits = widened(logits)
    if temperature != 1:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=1)
