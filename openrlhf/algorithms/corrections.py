"""Corrections for the train/rollout mismatch, in which the trainer and the engine assign different
probabilities to the same token.

ω = π_old / π_rollout, where the trainer recomputes π_old. A correction multiplies the loss of each
token by a weight computed from ω. It has three parts: the *level* at which ω is computed, the
*mode* in which ω is bounded, and the *band* that contains the bounds.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from openrlhf.algorithms.tensors import PerToken, TokenMask, bounded_exp, log_ratio

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["clip", "mask", "truncate"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A level, a mode and a band, 0 ≤ low < high.

    The level is the token's own ω, the product of ω over its row, or the geometric mean of ω over
    its row. The mode is one of three: `clip` clips the level's ω to the band; `truncate` applies
    only the upper bound; `mask` weights the token by its own ω, or by 0 if the level's ω is outside
    the band.
    """

    level: Level
    mode: Mode
    low: float
    high: float


@torch.no_grad()
def correction_weights(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: TokenMask, correction: Correction
) -> tuple[PerToken, TokenMask]:
    """Return the weight of each token's loss, without gradient, and a mask of tokens whose ω is out
    of bounds.

    With ω = [0.4, 1, 9] in one row and the band [0.5, 5]: token clip → [0.5, 1, 5]; token mask →
    [0, 1, 0]; token truncate → [0.4, 1, 5]; geometric mask → [0.4, 1, 9], because the geometric
    mean of the row, 1.53, lies in the band. Zero (False) outside `mask`; ω is bounded to exp(±20).
    """
    log_omega = log_ratio(old_logprobs, rollout_logprobs, mask)
    token_omega = bounded_exp(log_omega)
    level_log_omega = _at_level(log_omega, mask, correction.level)
    omega = bounded_exp(level_log_omega).expand_as(token_omega)
    low, high = correction.low, correction.high
    if correction.mode == "truncate":
        low = 0.0
    outside = (omega < low) | (omega > high)
    if correction.mode == "mask":
        weights = token_omega.masked_fill(outside, 0)
    else:
        weights = omega.clamp(low, high)
    return weights.masked_fill(~mask, 0), outside & mask


def _at_level(log_omega: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return log ω of each token (B, T), or one number per row (B, 1)."""
    if level == "token":
        return log_omega
    total = log_omega.sum(1, keepdim=True)
    if level == "sequence":
        return total
    return total / mask.sum(1, keepdim=True).clamp(min=1)
