"""Credit assignment: from rewards to advantages and returns. One estimator, one name.

An estimator is two ideas: how the rewards of a prompt's samples are shaped before they become token rewards (the
baseline), and how token rewards become advantages. The caller takes the same steps with every estimator:
`shape_rewards` → `rewards.clip_rewards` → `rewards.token_rewards` → the estimator's `credit` → `normalize_advantages`.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from openrlhf.algorithms.registry import Registry
from openrlhf.algorithms.tensors import GroupIds, PerSample, PerToken, TokenMask, masked_whiten

GROUP_STD_EPSILON = 1e-9

RewardShaping = Callable[[Tensor, Tensor], Tensor]  # (rewards (R,), group (R,)) -> (R,)
# Token rewards, values and mask, with gamma= and lam= -> (advantages, returns) (B, T). Values are 0 without a critic.
CreditAssignment = Callable[..., tuple[Tensor, Tensor]]


def gae(
    token_rewards: PerToken, values: PerToken, mask: TokenMask, *, gamma: float, lam: float
) -> tuple[PerToken, PerToken]:
    """δ_t = r_t + γ V_{t+1} − V_t,   Â_t = δ_t + γλ Â_{t+1}.     Schulman et al. 2016, eq. 16, arXiv:1506.02438

    Positions outside `mask` are stepped over: an action before a tool call bootstraps from the next action. After the
    last action V and Â are 0. Returns (advantages, returns), zero outside `mask`; returns = advantages + values; not
    whitened. Raises ValueError if the three shapes differ.
    """
    if not token_rewards.shape == values.shape == mask.shape:
        shapes = [tuple(x.shape) for x in (token_rewards, values, mask)]
        raise ValueError(f"token rewards, values and mask must be blocks of one shape, not {shapes}")
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    order = (~mask).byte().argsort(dim=1, stable=True)[:, :longest]  # each row's actions, in order
    acting = mask.gather(1, order)
    rewards = token_rewards.gather(1, order).masked_fill(~acting, 0)
    baseline = values.gather(1, order).masked_fill(~acting, 0)
    deltas = rewards + gamma * F.pad(baseline, (0, 1))[:, 1:] - baseline
    advantages = _discounted_sums(deltas, gamma * lam)
    blank = torch.zeros_like(token_rewards)
    return blank.scatter(1, order, advantages), blank.scatter(1, order, advantages + baseline)


def _discounted_sums(x: PerToken, decay: float) -> PerToken:
    """S_t = x_t + decay · S_{t+1}, from the right."""
    sums = torch.empty_like(x)
    following = x.new_zeros(len(x))
    for t in reversed(range(x.shape[1])):
        following = torch.add(x[:, t], following, alpha=decay)
        sums[:, t] = following
    return sums


def monte_carlo(
    token_rewards: PerToken, values: PerToken, mask: TokenMask, *, gamma: float, lam: float
) -> tuple[PerToken, PerToken]:
    """Â_t = Ĝ_t = r_t + γ Ĝ_{t+1} over action tokens, zero elsewhere: GAE with λ = 1 and no critic.

    The credit of every estimator without a critic; `values` and `lam` are not used.
    """
    returns, _ = gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)
    return returns, returns


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Each sample compared with the samples of its prompt; float64."""

    centered: Float[Tensor, " R"]  # reward − mean of the group
    size: Float[Tensor, " R"]
    std: Float[Tensor, " R"]  # unbiased; 0 for a sample without peers


def group_statistics(rewards: PerSample, group: GroupIds) -> GroupStatistics:
    """Statistics of each sample's group. Groups may differ in size, and their samples need not be neighbours.

    Equal rewards have exactly zero `centered` and `std`, because rewards are measured from the smallest reward of the
    group. A mean of the rewards themselves may have a rounding error, and a division by the tiny standard deviation
    would make this error as large as real advantages.
    """
    untyped = cast(Any, torch)
    _, place, counts = untyped.unique(group, return_inverse=True, return_counts=True)
    exact = rewards.double()
    lowest = exact.new_zeros(len(counts)).scatter_reduce(0, place, exact, "amin", include_self=False)
    above = exact - lowest[place]
    size = counts.double()
    mean = exact.new_zeros(len(counts)).index_add(0, place, above) / size
    centered = above - mean[place]
    squares = exact.new_zeros(len(counts)).index_add(0, place, centered.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics(centered=centered, size=size[place], std=std[place])


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator: a shaping of rewards, and its properties."""

    shape: RewardShaping  # 0 for a sample without peers if `per_group`: there is nothing to compare the sample with
    _: KW_ONLY
    credit: CreditAssignment = monte_carlo
    per_group: bool = False  # compares the samples of one prompt: needs two or more of them, and γ = 1
    needs_critic: bool = False
    whiten: bool = False  # advantages are normalised over all action tokens of the batch


class EstimatorError(ValueError):
    """The shaping of an estimator (possibly a user's) broke its contract. The message completes the caller's sentence."""


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", AdvantageEstimator)
advantage_estimator = ADVANTAGE_ESTIMATORS.register  # decorates a shaping


@advantage_estimator("gae", needs_critic=True, whiten=True, credit=gae)
@advantage_estimator("reinforce", whiten=True)
def unshaped(rewards: PerSample, group: GroupIds) -> PerSample:
    """R unchanged: the baseline is V, or the mean that whitening subtracts.

    GAE as in PPO, arXiv:1707.06347; REINFORCE++, Hu et al. 2025, arXiv:2501.03262
    """
    return rewards


@advantage_estimator("reinforce_baseline", per_group=True, whiten=True)
@advantage_estimator("dr_grpo", per_group=True)
def mean_baseline(rewards: PerSample, group: GroupIds) -> PerSample:
    """R_i − mean of the prompt's rewards.

    REINFORCE++-baseline, arXiv:2501.03262, whitens the result; Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, does not.
    """
    return group_statistics(rewards, group).centered.to(rewards.dtype)


@advantage_estimator("rloo", per_group=True)
def rloo(rewards: PerSample, group: GroupIds) -> PerSample:
    """R_i − mean of the *other* rewards of the prompt, which is (R_i − mean) · n / (n − 1).

    Ahmadian et al. 2024, arXiv:2402.14740
    """
    stats = group_statistics(rewards, group)
    return (stats.centered * stats.size / (stats.size - 1).clamp(min=1)).to(rewards.dtype)


@advantage_estimator("group_norm", per_group=True)
def group_norm(rewards: PerSample, group: GroupIds) -> PerSample:
    """(R_i − mean) / (std + 1e-9), std unbiased.  GRPO, Shao et al. 2024, arXiv:2402.03300"""
    stats = group_statistics(rewards, group)
    return (stats.centered / (stats.std + GROUP_STD_EPSILON)).to(rewards.dtype)


def shape_rewards(rewards: PerSample, group: GroupIds, estimator: AdvantageEstimator) -> PerSample:
    """The rewards of all samples of the batch after the estimator's shaping.

    Raises ValueError if a reward is not finite: the reward is missing, or its source is broken. Raises EstimatorError if the
    shaping fails, or returns anything but one finite number per sample.
    """
    broken = {i: float(reward) for i, reward in enumerate(rewards) if not math.isfinite(reward)}
    if broken:
        raise ValueError(f"rewards must be finite numbers, but by sample they are {broken}")
    try:
        shaped: Any = estimator.shape(rewards, group)
    except Exception as error:
        raise EstimatorError(
            f"it failed with {type(error).__name__}: {error}. It is called with two tensors: the rewards of all samples "
            "of the batch, and the numbers of their prompts."
        ) from error
    wanted = f"It has to return a tensor of {len(rewards)} floating-point numbers, one per sample"
    if not isinstance(shaped, Tensor) or not shaped.is_floating_point():
        raise EstimatorError(f"it returned {type(shaped).__name__} {shaped!r:.80}. {wanted}.")
    if shaped.shape != rewards.shape:
        raise EstimatorError(f"it returned a tensor of shape {tuple(shaped.shape)}. {wanted}.")
    if not shaped.isfinite().all():
        sample = int((~shaped.isfinite()).nonzero()[0])
        raise EstimatorError(
            f"of a reward of {float(rewards[sample]):g} it made {float(shaped[sample]):g}. {wanted}, all finite."
        )
    return shaped


def normalize_advantages(
    advantages: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"], estimator: AdvantageEstimator, *, scale: bool = True
) -> Float[Tensor, "*s"]:
    """Advantages whitened over the action tokens of the whole batch, if the estimator asks for whitening."""
    return masked_whiten(advantages, mask, scale=scale) if estimator.whiten else advantages
