"""Train/rollout mismatch: the engine gave a token another probability than the trainer gives the token.

ω = π_old / π_rollout, π_old recomputed by the trainer. A correction multiplies each token's loss by a weight made of ω.
A correction has three parts: the *level* at which ω is taken, the *mode* in which ω is bounded, and the *band* of the
bounds.
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
    """One choice of level, mode and band, 0 ≤ low < high.

    Level: ω of the token itself, the product over the tokens of its row, or their geometric mean. Mode: `clip` holds
    the ω of the level to the band; `truncate` holds it below the upper end only; `mask` gives the token its own ω, or 0
    if the ω of the level is outside the band.
    """

    level: Level
    mode: Mode
    low: float
    high: float


@torch.no_grad()
def correction_weights(
    old_logprobs: PerToken, rollout_logprobs: PerToken, mask: TokenMask, correction: Correction
) -> tuple[PerToken, TokenMask]:
    """The weight of each token's loss, without gradient, and the tokens whose ω was out of bounds.

    With ω = [0.4, 1, 9] in one row and the band [0.5, 5]: token clip → [0.5, 1, 5]; token mask → [0, 1, 0]; token
    truncate → [0.4, 1, 5]; geometric mask → [0.4, 1, 9], because the row's mean of 1.53 lies in the band. Zero (False)
    outside `mask`; ω is bounded to exp(±20).
    """
    log_omega = log_ratio(old_logprobs, rollout_logprobs, mask)
    own = bounded_exp(log_omega)
    omega = bounded_exp(_at_level(log_omega, mask, correction.level)).expand_as(own)
    low = 0.0 if correction.mode == "truncate" else correction.low
    outside = (omega < low) | (omega > correction.high)
    weights = own.masked_fill(outside, 0) if correction.mode == "mask" else omega.clamp(low, correction.high)
    return weights.masked_fill(~mask, 0), outside & mask


def _at_level(log_omega: Tensor, mask: Tensor, level: Level) -> Tensor:
    if level == "token":
        return log_omega
    total = log_omega.sum(1, keepdim=True)
    return total if level == "sequence" else total / mask.sum(1, keepdim=True).clamp(min=1)
