"""Corrections for the train/rollout mismatch, in which the trainer and the engine assign different
probabilities to the same token.

For a sampled token, p = π_rollout is the engine's probability, q = π_old is the probability that
the trainer recomputes, and ω = q / p. A correction multiplies the loss of each token by a weight.
A correction is defined by a *gating* statistic, the *level* at which the statistic is computed, a
*band* of accepted values, and a *mode*, which determines the weights outside the band.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from openrlhf.algorithms.tensors import PerToken, TokenMask, bounded_exp, log_ratio

Gating = Literal["ratio", "binary_kl", "tv"]
Level = Literal["token", "seq", "seq-product"]
Mode = Literal["mask", "clip"]
MIN_PROBABILITY = 1e-6  # divergences clip p and q to [1e-6, 1 − 1e-6]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A correction's gating statistic, level, mode and band, with 0 ≤ low < high.

    The mode `mask` sets a token's weight to its own ω, which is not clipped, or to 0 if the
    statistic is outside the band. The mode `clip` sets the weight to the statistic, clipped to the
    band. The mode `clip` and the level `seq-product` both require the gating `ratio`.
    """

    gating: Gating
    level: Level
    mode: Mode
    low: float
    high: float


def binary_kl(old_logprobs: PerToken, rollout_logprobs: PerToken) -> PerToken:
    """Compute p ln(p/q) + (1 − p) ln((1 − p)/(1 − q)) in nats, in float64.

    This is KL(π_rollout‖π_old) with all tokens except the sampled token merged into one. Qi et al.
    2026, arXiv:2602.04879 (binary approximation)
    """
    p, q = _probabilities(rollout_logprobs), _probabilities(old_logprobs)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def total_variation(old_logprobs: PerToken, rollout_logprobs: PerToken) -> PerToken:
    """Compute |p − q| in float64.

    This is the total variation distance with all tokens except the sampled token merged into one.

    Qi et al. 2026, arXiv:2602.04879 (binary approximation)
    """
    return (_probabilities(rollout_logprobs) - _probabilities(old_logprobs)).abs()


def _probabilities(logprobs: PerToken) -> PerToken:
    return logprobs.double().exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def gate_statistic(
    old_logprobs: PerToken,
    rollout_logprobs: PerToken,
    mask: TokenMask,
    *,
    gating: Gating,
    level: Level,
) -> PerToken:
    """Return the statistic that is compared with the band, (B, T). At a sequence level, all tokens
    of a row have the same value.

    | level | `ratio` | `binary_kl`, `tv` |
    |---|---|---|
    | `token` | ω | the token's divergence |
    | `seq` | exp(mean of ln ω), the geometric mean | mean over the action tokens |
    | `seq-product` | exp(sum of ln ω), the ratio of the entire answer | – |

    ω and its products are bounded to exp(±20). Values outside `mask` are ignored, even NaN.
    """
    if gating == "ratio":
        per_token = log_ratio(old_logprobs, rollout_logprobs, mask)
    else:
        divergence = binary_kl
        if gating == "tv":
            divergence = total_variation
        per_token = divergence(old_logprobs, rollout_logprobs).masked_fill(~mask, 0)
    statistic = _at_level(per_token, mask, level).expand_as(per_token)
    if gating == "ratio":
        return bounded_exp(statistic)
    return statistic


def _at_level(per_token: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the values per token (B, T), or their mean or sum over each row (B, 1)."""
    if level == "token":
        return per_token
    total = per_token.sum(1, keepdim=True)
    if level == "seq-product":
        return total
    return total / mask.sum(1, keepdim=True).clamp(min=1)


@torch.no_grad()
def correction_weights(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: TokenMask, correction: Correction
) -> tuple[PerToken, TokenMask]:
    """Return the weight of each token's loss, without gradient, and a mask of the tokens that are
    outside the band.

    For a row with ω = [0.4, 1, 9], the gating `ratio` and the band [0.5, 5], the weights are
    [0.5, 1, 5] with `token` and `clip`; [0, 1, 0] with `token` and `mask`; and [0.4, 1, 9] with
    `seq` and `mask`, because the geometric mean of the row is 1.53. Outside `mask`, weights are 0
    and the mask is False; ω is bounded to exp(±20).
    """
    statistic = gate_statistic(
        old_logprobs, rollout_logprobs, mask, gating=correction.gating, level=correction.level
    )
    outside = (statistic < correction.low) | (statistic > correction.high)
    if correction.mode == "clip":
        weights = statistic.clamp(correction.low, correction.high)
    else:
        omega = bounded_exp(log_ratio(old_logprobs, rollout_logprobs, mask))
        weights = omega.masked_fill(outside, 0)
    return weights.masked_fill(~mask, 0), outside & mask


def filtered_units(
    outside: Bool[Tensor, "B T"], mask: TokenMask, level: Level
) -> tuple[float, float]:
    """Return the number of tokens outside the band, and the total number of tokens.

    At a sequence level, sequences are counted instead of tokens.
    """
    if level == "token":
        return float(outside.sum()), float(mask.sum())
    return float(outside.any(1).sum()), float(mask.any(1).sum())
