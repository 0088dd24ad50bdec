"""Per-token policy and value losses, and the weights that reduce them to one number.

A loss function returns one term per token. With `aggregation_weights`, loss = Σ_window Σ weights ·
terms / Σ_window count. The window consists of all micro-batches of an optimizer step on all ranks,
so the loss does not depend on how the window was split. For an empty mask, the loss is a
differentiable zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.registry import Registry
from openrlhf.algorithms.tensors import PerToken, TokenMask, bounded_exp, log_ratio
from openrlhf.config import choices


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A per-token policy loss, zero outside the mask. Only `per_token` has a gradient."""

    per_token: PerToken
    clipped: TokenMask  # True where clipping changed the term
    approx_kl: PerToken  # log π_old − log π_θ, nats, unbounded


@dataclass(frozen=True, kw_only=True)
class Clip:
    """The clip range [1 − low, 1 + high] of the ratio, and the dual clip (> 1) for negative
    advantages.
    """

    low: float
    high: float
    dual: float | None = None


# A function of log π_θ (with gradient), log π_old, Â, the action mask (all (B, T)) and the clip.
PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], PolicyLoss]


POLICY_LOSSES: Registry[PolicyLossFunction] = Registry(
    "policy loss", choices.POLICY_LOSSES, choices.LossTraits
)
policy_loss = POLICY_LOSSES.register


@policy_loss("ppo")
def ppo(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask, clip: Clip
) -> PolicyLoss:
    """Compute ℓ = −min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â).

    Schulman et al. 2017, eq. 7, arXiv:1707.06347

    ε_high > ε_low is DAPO's clip-higher (arXiv:2503.14476). A dual clip c bounds ℓ by −c Â if Â < 0
    (Ye et al. 2020, arXiv:1912.09729); `clipped` ignores the dual clip.
    """
    log_rho = log_ratio(logprobs, old_logprobs, mask)
    return _surrogate(bounded_exp(log_rho), log_rho, advantages, mask, clip)


@policy_loss("gspo")
def gspo(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask, clip: Clip
) -> PolicyLoss:
    """Compute the `ppo` loss with one ρ per sequence: the geometric mean of its token ratios.

    Zheng et al. 2025, eqs. 5–7, arXiv:2507.18071

    The paper uses ε = 3e-4 and 4e-4, because sequence ratios stay much closer to 1 than token
    ratios.
    """
    log_rho = log_ratio(logprobs, old_logprobs, mask)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    mean = log_rho.sum(1, keepdim=True) / lengths
    rho = bounded_exp(mean).expand_as(log_rho)
    return _surrogate(rho, log_rho, advantages, mask, clip)


def _surrogate(
    rho: Tensor, log_rho: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> PolicyLoss:
    """Compute PPO's pessimistic surrogate for a given ratio."""
    advantages = advantages.masked_fill(~mask, 0)
    unclipped = rho * advantages
    clipped_objective = rho.clamp(1 - clip.low, 1 + clip.high) * advantages
    objective = torch.minimum(unclipped, clipped_objective)
    if clip.dual is not None:
        bounded = torch.maximum(objective, clip.dual * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return PolicyLoss(
        per_token=-objective,
        clipped=(clipped_objective < unclipped).detach(),
        approx_kl=-log_rho.detach(),
    )


@policy_loss("cispo")
def cispo(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask, clip: Clip
) -> PolicyLoss:
    """Compute ℓ = −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) Â log π_θ: every token keeps a gradient.

    MiniMax-M1, 2025, eqs. 4 and 5, arXiv:2506.13585

    ε_low = 1 removes the lower bound, as in the paper. A dual clip is ignored.
    """
    log_rho = log_ratio(logprobs, old_logprobs, mask).detach()
    rho = bounded_exp(log_rho)  # 1 outside the mask
    weight = rho.clamp(1 - clip.low, 1 + clip.high)
    advantages = advantages.masked_fill(~mask, 0)
    logprobs = logprobs.masked_fill(~mask, 0)
    return PolicyLoss(
        per_token=-weight * advantages * logprobs,
        clipped=weight != rho,
        approx_kl=-log_rho,
    )


def value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, mask: TokenMask, *, clip: float
) -> PerToken:
    """Compute ½ max((V − Ĝ)², (V_old + clip(V − V_old, ±c) − Ĝ)²) per token.

    Zero outside the mask. c = inf gives the plain squared error. PPO in OpenAI Baselines uses the
    same loss.
    """
    columns = (values, old_values, returns)
    values, old_values, returns = (column.masked_fill(~mask, 0) for column in columns)
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    error, clipped_error = values - returns, clipped_values - returns
    return 0.5 * torch.maximum(error.square(), clipped_error.square())


# (action mask, maximum response length) -> (weights (B, T), micro-batch's share of the denominator)
Aggregation = Callable[[Tensor, int], tuple[Tensor, float]]


def token_mean(mask: TokenMask, max_tokens: int) -> tuple[PerToken, float]:
    """Weight all tokens equally: the loss is the mean over the window's tokens.

    DAPO, eq. 8, arXiv:2503.14476
    """
    return mask.float(), float(mask.sum())


def sequence_mean(mask: TokenMask, max_tokens: int) -> tuple[PerToken, float]:
    """Weight all sequences equally: the loss is the mean of the per-sequence means.

    GRPO, eq. 3, arXiv:2402.03300
    """
    lengths = mask.sum(1, keepdim=True)
    return mask / lengths.clamp(min=1), float((lengths > 0).sum())


def constant_length(mask: TokenMask, max_tokens: int) -> tuple[PerToken, float]:
    """Divide the sum over each sequence by a constant that does not depend on the sequence's
    length.

    Dr. GRPO, arXiv:2503.20783
    """
    return mask / max_tokens, float(mask.any(1).sum())


AGGREGATIONS: dict[str, Aggregation] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "constant": constant_length,
}


def aggregation_weights(mask: TokenMask, kind: str, *, max_tokens: int) -> tuple[PerToken, float]:
    """Return (weights, count) of a micro-batch: loss = Σ_window Σ weights · ℓ / Σ_window count.

    Rows with an empty mask do not count. For the mask [[T, T], [T, F]]: token → [[1, 1], [1, 0]]
    and 3; sequence → [[½, ½], [1, 0]] and 2; constant with `max_tokens` 4 → [[¼, ¼], [¼, 0]] and 2.
    """
    return AGGREGATIONS[kind](mask, max_tokens)
