"""Policy and value losses per token, and the weights that reduce the terms to one number.

A loss returns terms per token. With `aggregation_weights`, loss = Σ_window Σ weights · terms / Σ_window count, summed
over the micro-batches and ranks of an optimizer step: the loss cannot depend on how the window was split. An empty mask
gives a zero that can be differentiated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.registry import Registry
from openrlhf.algorithms.tensors import PerToken, TokenMask, bounded_exp, log_ratio


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy loss by token; zero outside the mask. Only `per_token` has a gradient."""

    per_token: PerToken
    clipped: TokenMask  # the clip range changed this token's term
    approx_kl: PerToken  # log π_old − log π_θ, nats, unbounded


@dataclass(frozen=True, kw_only=True)
class Clip:
    """The range [1 − low, 1 + high] of a ratio, and the dual clip, above 1, of tokens with a negative advantage."""

    low: float
    high: float
    dual: float | None = None


# log π_θ (with gradient), log π_old, Â and the action mask, all (B, T), and the clip
PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], PolicyLoss]


@dataclass(frozen=True)
class PolicyLossChoice:
    """A registered policy loss and the aggregation that its paper uses."""

    function: PolicyLossFunction
    aggregation: str = "token"


POLICY_LOSSES: Registry[PolicyLossChoice] = Registry("policy loss", PolicyLossChoice)
policy_loss = POLICY_LOSSES.register


@policy_loss("ppo")
def ppo(logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask, clip: Clip) -> PolicyLoss:
    """ℓ = −min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â).     Schulman et al. 2017, eq. 7, arXiv:1707.06347

    ε_high > ε_low is DAPO's clip-higher (arXiv:2503.14476). A dual clip c bounds ℓ by −c Â if Â < 0 (Ye et al. 2020,
    arXiv:1912.09729); `clipped` does not count the dual clip.
    """
    log_rho = log_ratio(logprobs, old_logprobs, mask)
    return _surrogate(bounded_exp(log_rho), log_rho, advantages, mask, clip)


@policy_loss("gspo", aggregation="sequence")
def gspo(logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask, clip: Clip) -> PolicyLoss:
    """As `ppo`, with one ρ per sequence: the geometric mean of the ratios of its tokens.

    The paper's ε are 3e-4 and 4e-4: sequence ratios stay far closer to 1 than token ratios. Zheng et al. 2025, eqs.
    5–7, arXiv:2507.18071
    """
    log_rho = log_ratio(logprobs, old_logprobs, mask)
    mean = log_rho.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    rho = bounded_exp(mean).expand_as(log_rho)
    return _surrogate(rho, log_rho, advantages, mask, clip)


def _surrogate(rho: Tensor, log_rho: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> PolicyLoss:
    """The pessimistic surrogate of PPO for any ratio."""
    advantages = advantages.masked_fill(~mask, 0)
    plain = rho * advantages
    held = rho.clamp(1 - clip.low, 1 + clip.high) * advantages
    objective = torch.minimum(plain, held)
    if clip.dual is not None:
        bounded = torch.maximum(objective, clip.dual * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return PolicyLoss(per_token=-objective, clipped=(held < plain).detach(), approx_kl=-log_rho.detach())


@policy_loss("cispo")
def cispo(logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: TokenMask, clip: Clip) -> PolicyLoss:
    """ℓ = −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) Â log π_θ: every token keeps a gradient.

    ε_low = 1 leaves the lower side open, as in the paper. The loss has no use for a dual clip. MiniMax-M1, 2025, eqs. 4
    and 5, arXiv:2506.13585
    """
    log_rho = log_ratio(logprobs, old_logprobs, mask).detach()
    rho = bounded_exp(log_rho).masked_fill(~mask, 0)
    weight = rho.clamp(1 - clip.low, 1 + clip.high)
    return PolicyLoss(
        per_token=-weight * advantages.masked_fill(~mask, 0) * logprobs.masked_fill(~mask, 0),
        clipped=(weight != rho) & mask,
        approx_kl=-log_rho,
    )


def value_loss(values: PerToken, old_values: PerToken, returns: PerToken, mask: TokenMask, *, clip: float) -> PerToken:
    """½ max((V − Ĝ)², (V_old + clip(V − V_old, ±c) − Ĝ)²) per token.

    Zero outside the mask. c = inf gives the plain squared error. After the PPO of OpenAI Baselines.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0) for x in (values, old_values, returns))
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (held - returns).square())


# action mask and the longest response -> (weights (B, T), this micro-batch's part of the denominator)
Aggregation = Callable[[Tensor, int], tuple[Tensor, float]]
AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


@AGGREGATIONS.register("token")
def token_mean(mask: TokenMask, max_tokens: int) -> tuple[PerToken, float]:
    """Every token counts the same: the mean over the window.  DAPO, eq. 8, arXiv:2503.14476"""
    return mask.float(), float(mask.sum())


@AGGREGATIONS.register("sequence")
def sequence_mean(mask: TokenMask, max_tokens: int) -> tuple[PerToken, float]:
    """Every sequence counts the same: the mean of means.  GRPO, eq. 3, arXiv:2402.03300"""
    lengths = mask.sum(1, keepdim=True)
    return mask / lengths.clamp(min=1), float((lengths > 0).sum())


@AGGREGATIONS.register("constant")
def constant_length(mask: TokenMask, max_tokens: int) -> tuple[PerToken, float]:
    """Sums of sequences ÷ a constant: length has no influence.  Dr. GRPO, arXiv:2503.20783"""
    return mask / max_tokens, float(mask.any(1).sum())


def aggregation_weights(mask: TokenMask, kind: str, *, max_tokens: int) -> tuple[PerToken, float]:
    """(weights, count) of a micro-batch: loss = Σ_window Σ weights · ℓ / Σ_window count.

    Rows with an empty mask are not counted. For mask [[T, T], [T, F]]: token → [[1, 1], [1, 0]] and 3; sequence → [[½,
    ½], [1, 0]] and 2; constant with `max_tokens` 4 → [[¼, ¼], [¼, 0]] and 2. Raises ValueError for an unknown kind.
    """
    return AGGREGATIONS[kind](mask, max_tokens)
