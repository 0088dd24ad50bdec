"""Converts episode rewards to token rewards.

The steps for a batch are, in order, length penalties, the estimator's shaping
(`advantages.shape_rewards`), clipping and token rewards.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from openrlhf.algorithms.tensors import PerRow, PerToken, TokenMask


def overlong_penalty(
    lengths: Int[Tensor, " B"],
    *,
    max_length: int | Int[Tensor, " B"],
    buffer: float,
    factor: float = 1.0,
) -> PerRow:
    """Return −factor · e / buffer, to be added to the rewards; e is the number of tokens beyond
    max_length − buffer, capped at buffer.

    DAPO, Yu et al. 2025, eq. 13, arXiv:2503.14476

    `lengths` count action tokens. `max_length` is a single number, or one number per sample if
    prompts of different lengths leave different amounts of room. With max_length 100, buffer 20 and
    factor 1: length 80 → 0, 90 → −0.5, 100 and above → −1.
    """
    excess = (lengths - (max_length - buffer)).clamp(0, buffer)
    return (-factor * excess / buffer).to(torch.float32)


def stop_properly_penalty(rewards: PerRow, truncated: Bool[Tensor, " B"], coef: float) -> PerRow:
    """Multiply the rewards of truncated samples by `coef` (at most 1), or replace them with `coef`
    if it is negative.
    """
    if coef < 0:
        return torch.where(truncated, coef, rewards)
    return torch.where(truncated, rewards * coef, rewards)


def clip_rewards(rewards: PerRow, low: float, high: float) -> PerRow:
    """Clip rewards to [low, high], after the estimator's shaping."""
    return rewards.clamp(low, high)


def last_action(action_mask: TokenMask) -> TokenMask:
    """Return a mask of each row's last action token: [F, T, T, F, T, F] → [F, F, F, F, T, F]."""
    actions_from_here = action_mask.flip(1).cumsum(1).flip(1)
    return action_mask & (actions_from_here == 1)


def token_rewards(
    rewards: PerRow,
    kl: PerToken | None,
    action_mask: TokenMask,
    kl_coef: float,
    turns: PerToken | None = None,
) -> PerToken:
    """Compute r_t = −β · kl_t at every action token, plus the row's reward at its last action
    token.

    Ziegler et al. 2019, eq. 2, arXiv:1909.08593

    `kl` is None if the KL is not part of the reward; a negative β counts as 0. `turns` holds the
    rewards of earlier turns at the positions where the turns end; the last action token gets the
    rest of the reward. A row without action tokens gets no reward. Zero outside `action_mask`.
    """
    if turns is None:
        earlier = torch.zeros_like(action_mask, dtype=torch.float32)
    else:
        earlier = turns.masked_fill(~action_mask, 0)
    rest = rewards - earlier.sum(1)
    outcome = earlier + last_action(action_mask) * rest[:, None]
    if kl is None or kl_coef <= 0:
        return outcome
    return outcome - kl_coef * kl.masked_fill(~action_mask, 0)
