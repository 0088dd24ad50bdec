"""From the reward of an episode to the reward of each token.

The steps of a batch, in order: length penalties, the estimator's shaping (`advantages.shape_rewards`), the clip, the
token rewards.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from openrlhf.algorithms.tensors import PerRow, PerSample, PerToken, TokenMask


def overlong_penalty(
    lengths: Int[Tensor, " R"], *, max_length: int | Int[Tensor, " R"], buffer: float, factor: float = 1.0
) -> PerSample:
    """−factor · e / buffer, e = the tokens beyond max_length − buffer, at most buffer; to be added to the rewards.

    `lengths` count action tokens. `max_length` is one number, or one per sample if prompts leave different room. With
    max_length 100, buffer 20, factor 1: length 80 → 0, 90 → −0.5, 100 and more → −1. DAPO, Yu et al. 2025, eq. 13,
    arXiv:2503.14476
    """
    excess = (lengths - (max_length - buffer)).clamp(0, buffer)
    return (-factor * excess / buffer).to(torch.float32)


def stop_properly_penalty(rewards: PerSample, truncated: Bool[Tensor, " R"], coef: float) -> PerSample:
    """Rewards of truncated samples are multiplied by `coef`, at most 1, or replaced by a negative `coef`."""
    return torch.where(truncated, rewards * coef if coef >= 0 else coef, rewards)


def clip_rewards(rewards: PerSample, low: float, high: float) -> PerSample:
    """The rewards held to [low, high], after the estimator's shaping."""
    return rewards.clamp(low, high)


def last_action(action_mask: TokenMask) -> TokenMask:
    """True at the last action token of each row: [F, T, T, F, T, F] → [F, F, F, F, T, F]."""
    actions_from_here = action_mask.flip(1).cumsum(1).flip(1)
    return action_mask & (actions_from_here == 1)


def token_rewards(
    rewards: PerRow, kl: PerToken | None, action_mask: TokenMask, kl_coef: float, turns: PerToken | None = None
) -> PerToken:
    """r_t = −β · kl_t at every action token, plus the row's reward at its last action token; zero elsewhere.

    `kl` is None if no KL enters the reward; a negative β counts as 0. `turns` has parts of the reward at the ends of
    earlier turns; the last action token gets the rest. A row without action tokens gets no reward. Ziegler et al. 2019,
    eq. 2, arXiv:1909.08593
    """
    placed = torch.zeros_like(action_mask, dtype=torch.float32) if turns is None else turns.masked_fill(~action_mask, 0)
    outcome = placed + last_action(action_mask) * (rewards - placed.sum(1))[:, None]
    if kl is None or kl_coef <= 0:
        return outcome
    return outcome - kl_coef * kl.masked_fill(~action_mask, 0)
