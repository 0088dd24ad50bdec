"""Credit assignment: advantages and returns from rewards.

An advantage estimator has two parts: a baseline, which shapes the rewards of a prompt's samples
before they become token rewards, and a credit assignment, which turns token rewards into
advantages. Every estimator runs the same steps: `shape_rewards` → `rewards.clip_rewards` →
`rewards.token_rewards` → the estimator's `credit` → `normalize_advantages`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from openrlhf.algorithms.registry import Registry
from openrlhf.algorithms.tensors import GroupIds, PerEpisode, PerToken, TokenMask, masked_whiten
from openrlhf.config import choices
from openrlhf.config.choices import EstimatorTraits

GROUP_STD_EPSILON = 1e-9

RewardShaping = Callable[[Tensor, Tensor], Tensor]  # (rewards (E,), group (E,)) -> (E,)
# (token rewards, values, mask, gamma=, lam=) -> (advantages, returns), all (B, T)
# Without a critic, the values are 0.
CreditAssignment = Callable[..., tuple[Tensor, Tensor]]


def gae(
    token_rewards: PerToken, values: PerToken, mask: TokenMask, *, gamma: float, lam: float
) -> tuple[PerToken, PerToken]:
    """Compute δ_t = r_t + γ V_{t+1} − V_t and Â_t = δ_t + γλ Â_{t+1}.

    Schulman et al. 2016, eq. 16, arXiv:1506.02438

    Positions outside `mask` are skipped: an action before a tool call bootstraps from the next
    action. V and Â are 0 after the last action. Returns (advantages, returns), (B, T), zero outside
    `mask`; returns = advantages + values; not whitened. Raises ValueError if the three shapes
    differ.
    """
    if not token_rewards.shape == values.shape == mask.shape:
        raise ValueError(
            "token rewards, values and mask must have the same shape, not "
            f"{token_rewards.shape}, {values.shape} and {mask.shape}"
        )
    if not mask.numel():
        return torch.zeros_like(token_rewards), torch.zeros_like(token_rewards)
    most_actions = int(mask.sum(1).max())
    # Move each row's actions to its front, keeping their order.
    order = (~mask).byte().argsort(dim=1, stable=True)[:, :most_actions]
    is_action = mask.gather(1, order)
    rewards = token_rewards.gather(1, order).masked_fill(~is_action, 0)
    baseline = values.gather(1, order).masked_fill(~is_action, 0)
    next_values = F.pad(baseline, (0, 1))[:, 1:]
    deltas = rewards + gamma * next_values - baseline
    advantages = _discounted_sums(deltas, gamma * lam)
    zeros = torch.zeros_like(token_rewards)
    return zeros.scatter(1, order, advantages), zeros.scatter(1, order, advantages + baseline)


def _discounted_sums(x: PerToken, decay: float) -> PerToken:
    """Compute S_t = x_t + decay · S_{t+1} along the last axis."""
    sums = torch.empty_like(x)
    following = x.new_zeros(len(x))
    for t in reversed(range(x.shape[1])):
        following = torch.add(x[:, t], following, alpha=decay)
        sums[:, t] = following
    return sums


def monte_carlo(
    token_rewards: PerToken, values: PerToken, mask: TokenMask, *, gamma: float, lam: float
) -> tuple[PerToken, PerToken]:
    """Compute Â_t = Ĝ_t = r_t + γ Ĝ_{t+1} over the action tokens. This is GAE with λ = 1 and
    without a critic.

    All critic-free estimators use this credit assignment. `values` and `lam` are ignored.
    """
    returns, _ = gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)
    return returns, returns


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Float64 statistics of each sample's group. A group consists of the samples of one prompt."""

    centered: Float[Tensor, " E"]  # the reward minus the group's mean
    size: Float[Tensor, " E"]
    std: Float[Tensor, " E"]  # unbiased standard deviation; 0 for a group of one sample


def group_statistics(rewards: PerEpisode, group: GroupIds) -> GroupStatistics:
    """Compute the statistics of each sample's group. Groups may differ in size, and their samples
    need not be adjacent.

    If all rewards in a group are equal, `centered` and `std` are exactly zero, because the group's
    smallest reward is subtracted first. Otherwise, a rounding error of the mean, divided by a tiny
    standard deviation, could become as large as a real advantage.
    """
    untyped = cast(Any, torch)
    _, group_index, counts = untyped.unique(group, return_inverse=True, return_counts=True)
    exact = rewards.double()
    zeros = exact.new_zeros(len(counts))
    lowest = zeros.scatter_reduce(0, group_index, exact, "amin", include_self=False)
    above_lowest = exact - lowest[group_index]
    size = counts.double()
    mean = zeros.index_add(0, group_index, above_lowest) / size
    centered = above_lowest - mean[group_index]
    squares = zeros.index_add(0, group_index, centered.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics(centered=centered, size=size[group_index], std=std[group_index])


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator: a reward shaping function and its traits."""

    shape: RewardShaping  # with `traits.per_group`, returns 0 for a group's only sample
    traits: EstimatorTraits = field(default_factory=EstimatorTraits)
    credit: CreditAssignment = monte_carlo


class EstimatorError(ValueError):
    """An error for an estimator, such as a plug-in's, that violates the reward-shaping contract.

    The message refers to the shaping function as "it", because the caller prepends the estimator's
    name.
    """


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator")


def advantage_estimator(
    name: str, *, credit: CreditAssignment = monte_carlo, **traits: bool
) -> Callable[[RewardShaping], RewardShaping]:
    """Return a decorator that registers a function that shapes rewards.

    `traits` are fields of `EstimatorTraits`. The traits of the built-in estimators are in the table
    `choices.ESTIMATORS`.
    """

    def decorate(shape: RewardShaping) -> RewardShaping:
        known = choices.ESTIMATORS.setdefault(name, EstimatorTraits(**traits))
        ADVANTAGE_ESTIMATORS.add(name, AdvantageEstimator(shape, known, credit))
        return shape

    return decorate


@advantage_estimator("gae", credit=gae)
@advantage_estimator("reinforce")
def unshaped(rewards: PerEpisode, group: GroupIds) -> PerEpisode:
    """Return R unchanged: the baseline is V, or the mean that whitening subtracts.

    GAE as in PPO, arXiv:1707.06347; REINFORCE++, Hu et al. 2025, arXiv:2501.03262
    """
    return rewards


@advantage_estimator("reinforce_baseline")
@advantage_estimator("dr_grpo")
def mean_baseline(rewards: PerEpisode, group: GroupIds) -> PerEpisode:
    """Compute R_i minus the mean reward of the prompt's samples.

    REINFORCE++-baseline (arXiv:2501.03262) whitens the result; `dr_grpo` (Liu et al. 2025,
    arXiv:2503.20783) does not.
    """
    return group_statistics(rewards, group).centered.to(rewards.dtype)


@advantage_estimator("flash_reinforce")
def batch_baseline(rewards: PerEpisode, group: GroupIds) -> PerEpisode:
    """Compute R_i minus the mean reward of the batch, in float64. Equal rewards give exactly zero.

    This is OpenRLHF's FlashREINFORCE, which uses one sample per prompt, no groups and no whitening.
    The baseline is the batch mean, as in REINFORCE with a baseline (Williams 1992).
    """
    return group_statistics(rewards, torch.zeros_like(group)).centered.to(rewards.dtype)


@advantage_estimator("rloo")
def rloo(rewards: PerEpisode, group: GroupIds) -> PerEpisode:
    """Compute R_i minus the mean of the prompt's *other* rewards: (R_i − mean) · n / (n − 1).

    Ahmadian et al. 2024, arXiv:2402.14740
    """
    stats = group_statistics(rewards, group)
    other_samples = (stats.size - 1).clamp(min=1)
    shaped = stats.centered * stats.size / other_samples
    return shaped.to(rewards.dtype)


@advantage_estimator("group_norm")
def group_norm(rewards: PerEpisode, group: GroupIds) -> PerEpisode:
    """Compute (R_i − mean) / (std + 1e-9) with the unbiased standard deviation of the group.

    GRPO, Shao et al. 2024, arXiv:2402.03300
    """
    stats = group_statistics(rewards, group)
    shaped = stats.centered / (stats.std + GROUP_STD_EPSILON)
    return shaped.to(rewards.dtype)


def shape_rewards(
    rewards: PerEpisode, group: GroupIds, estimator: AdvantageEstimator
) -> PerEpisode:
    """Apply an estimator's reward shaping to all samples in the batch.

    Raises ValueError if a reward is not finite, which means that the reward is missing or its
    source is broken. Raises EstimatorError if the shaping function fails or does not return one
    finite number per sample.
    """
    broken = [int(sample) for sample in (~rewards.isfinite()).nonzero()]
    if broken:
        raise ValueError(f"rewards must be finite, but the rewards of samples {broken} are not")
    try:
        shaped: Any = estimator.shape(rewards, group)
    except Exception as error:
        raise EstimatorError(
            f"it failed with {type(error).__name__}: {error}. It is called with two tensors: the "
            "rewards of all samples in the batch, and their prompt indices."
        ) from error
    is_column = isinstance(shaped, Tensor) and shaped.shape == rewards.shape
    if not (is_column and shaped.is_floating_point() and shaped.isfinite().all()):
        raise EstimatorError(
            f"it returned {shaped!r:.200}, but has to return a tensor of {len(rewards)} finite "
            "floating-point numbers, one per sample."
        )
    return shaped


def normalize_advantages(
    advantages: Float[Tensor, "*s"],
    mask: Bool[Tensor, "*s"],
    estimator: AdvantageEstimator,
    *,
    scale: bool = True,
) -> Float[Tensor, "*s"]:
    """Whiten the advantages over all action tokens in the batch if the estimator requires it."""
    if not estimator.traits.whiten:
        return advantages
    return masked_whiten(advantages, mask, scale=scale)
