"""Masked statistics over tokens; log-probabilities and entropies without holding all logits."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

PerToken = Float[Tensor, "B T"]  # position t describes token t
TokenMask = Bool[Tensor, "B T"]
PerRow = Float[Tensor, " B"]
PerSample = Float[Tensor, " R"]  # all samples of a batch, not only the rows of one block
GroupIds = Int[Tensor, " R"]  # equal numbers: samples of the same prompt

MIN_VARIANCE = 1e-8
LOG_RATIO_BOUND = 20.0  # nats; exp(20) = 4.9e8 is far outside every clip range and far inside float32
CHUNK_LOGITS = 1 << 25  # logits per chunk: 128 MiB in float32
NEGLIGIBLE_LOGPROB = -1e4  # exp of it is 0 in float64 too; keeps 0 · (−inf) out of entropies


def masked_sum(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float[Tensor, ""]:
    """Σ of x where mask. Values outside the mask, NaN included, reach neither the sum nor the gradient."""
    return x.masked_fill(~mask, 0).sum()


@torch.no_grad()
def masked_whiten(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"], *, scale: bool = True) -> Float[Tensor, "*s"]:
    """(x − μ) / √max(σ², 1e-8) over the masked positions, zero elsewhere. σ² is the population's.

    `scale=False` gives x − μ. Equal values give exactly zero. Otherwise the rounding error of μ, multiplied by up to
    10⁴, would be learned.
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
    """logprobs − base_logprobs in nats; zero outside the mask, also for NaN."""
    return (logprobs - base_logprobs).masked_fill(~mask, 0)


def bounded_exp(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """exp(x) with x held to ±20 nats: always finite, without a gradient beyond the bound."""
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
    """(log p(targets), entropy of p or None), p = softmax((hidden · weightᵀ + bias) / temperature).

    Nats. The logits of one chunk of rows are held at a time; the backward computes them again. The product runs in the
    dtype of its inputs, as in the inference engine; everything after the product runs in float32 (float64 for float64
    inputs). Both results are differentiable. A weight that needs no gradient costs none. `temperature` is above 0.
    """
    untyped = cast(Any, _LinearScores)
    return untyped.apply(hidden, weight, bias, targets, temperature, entropy)


def logit_logprobs(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """The results of `linear_logprobs`, from the logits themselves. Autograd keeps several copies of the logits."""
    log_p = _log_softmax(logits, temperature)
    bounded = log_p.clamp(min=NEGLIGIBLE_LOGPROB)
    return log_p.gather(1, targets[:, None])[:, 0], -(bounded.exp() * bounded).sum(1) if entropy else None


def row_chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    """Slices of `rows` whose logits fit into one chunk."""
    step = max(1, CHUNK_LOGITS // vocabulary)
    return (slice(start, start + step) for start in range(0, rows, step))


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
        logprobs = torch.empty(len(targets), dtype=dtype, device=states.device)
        entropy = torch.empty_like(logprobs) if want_entropy else None
        for rows in row_chunks(len(states), len(weight)):
            log_p = _log_softmax(F.linear(states[rows], weight, bias), temperature)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            if entropy is not None:
                log_p.clamp_(min=NEGLIGIBLE_LOGPROB)
                entropy[rows] = -(log_p.exp() * log_p).sum(1)
        ctx.save_for_backward(states, weight, bias, targets, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy only logged costs nothing in the backward
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = (None if g is None else g / ctx.temperature for g in grads)
        dtype = torch.promote_types(states.dtype, torch.float32)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(targets), dtype=dtype, device=states.device)
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_states = torch.empty_like(states) if needs_states else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in row_chunks(len(states), len(weight)):
            d_logits = _log_softmax(F.linear(states[rows], weight, bias), ctx.temperature)
            if grad_entropy is None:
                d_logits.exp_().mul_(-grad_logprobs[rows, None])
            else:
                p = d_logits.clamp_(min=NEGLIGIBLE_LOGPROB).exp()
                d_logits.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                d_logits.add_(grad_logprobs[rows, None]).mul_(p).neg_()
            d_logits.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(states.dtype)
            if d_states is not None:
                d_states[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.t() @ states[rows]
        return d_states, d_weight, d_bias, None, None, None  # autograd casts to the inputs' dtypes


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """A fresh (rows, V) block of log-probabilities in float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits / temperature if temperature != 1 else logits, dim=1)
