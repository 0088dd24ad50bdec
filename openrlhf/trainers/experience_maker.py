"""Converts episodes into a training batch: forward passes in workers, then pure functions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    EstimatorError,
    group_statistics,
    normalize_advantages,
    shape_rewards,
)
from openrlhf.algorithms.kl import KLController, kl_estimate
from openrlhf.algorithms.rewards import (
    clip_rewards,
    overlong_penalty,
    stop_properly_penalty,
    token_rewards,
)
from openrlhf.config.flags import UserError
from openrlhf.config.learning import RLFlags
from openrlhf.core.batches import Experience, Layout
from openrlhf.core.trajectory import Exclusion, Trajectory
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.stages import EpisodeRows, Stage, run_stages
from openrlhf.workers.base import mean_of
from openrlhf.workers.policy import kl_metrics

BLOCK_TOKENS = 1 << 20  # maximum number of tokens in a padded block of rows with similar lengths


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A batch with the columns computed by the workers.

    `trajectories` contains all episodes with their rewards. `exclusions` contains the reason why
    each episode is not in `experience`, or None for the episodes in `experience`.
    """

    experience: Experience
    trajectories: list[Trajectory]
    exclusions: list[Exclusion | None]
    timing: dict[str, Metric]

    @property
    def is_filtered(self) -> bool:
        """True if the dynamic filter rejected every episode, as can happen at an epoch's end."""
        return all(trajectory.filtered for trajectory in self.trajectories)


def find_exclusions(
    trajectories: Sequence[Trajectory], *, needs_groups: bool
) -> list[Exclusion | None]:
    """Return the reason why each episode is not trained on, or None if it is trained on.

    If samples of the same prompt are compared (`needs_groups`), the only sample of a prompt is also
    excluded.
    """
    exclusions: list[Exclusion | None] = []
    peers: Counter[int] = Counter()  # number of finished samples of each prompt
    for trajectory in trajectories:
        exclusion = _own_exclusion(trajectory)
        exclusions.append(exclusion)
        if exclusion is None:
            peers[trajectory.prompt.index] += 1
    if not needs_groups:
        return exclusions
    for place, trajectory in enumerate(trajectories):
        if exclusions[place] is None and peers[trajectory.prompt.index] == 1:
            exclusions[place] = Exclusion.ALONE
    return exclusions


def _own_exclusion(trajectory: Trajectory) -> Exclusion | None:
    """Return why an episode is not trained on, regardless of the other episodes of its batch."""
    if trajectory.failed:
        return Exclusion.FAILED
    if trajectory.filtered:
        return Exclusion.FILTERED
    if not trajectory.num_actions:
        return Exclusion.EMPTY
    return None


@dataclass(eq=False, repr=False)
class ExperienceMaker:
    """Adds model-computed columns to a batch and assigns credit to its tokens.

    The `stages` compute the columns needed by the update. If the episodes' source has already run
    the `RewardStage` (`RunStages.of_prompt`), it is not one of the `stages`. `kl` holds the KL
    coefficient, which is fixed or adapts to a target.
    """

    config: RLFlags
    stages: Sequence[Stage] = ()

    def __post_init__(self) -> None:
        kl = self.config.algo.kl
        self.kl = KLController(kl.init_coef, target=kl.target, horizon=kl.horizon)

    def annotate(self, trajectories: Sequence[Trajectory]) -> StepBatch:
        """Compute the columns that the update needs.

        The possible columns are R, log π_old, log π_ref, log π_teacher and V. The models run in
        parallel. Each timing metric is the time in seconds from the common start to the end of its
        stage. Columns that are not computed have no metric.
        """
        timing: dict[str, Metric] = {}
        needs_groups = self.config.estimator_traits.per_group
        exclusions = find_exclusions(trajectories, needs_groups=needs_groups)
        places = [place for place, exclusion in enumerate(exclusions) if exclusion is None]
        scored = EpisodeRows([trajectories[place] for place in places])
        if places:
            scored, timing = run_stages(scored, self.stages, self.config.train.step_timeout)
        experience = scored.rows
        trajectories = list(trajectories)
        for place, episode in zip(places, scored.episodes, strict=True):
            trajectories[place] = episode
        # A reward model may have returned a non-finite reward, or a teacher may not have answered.
        exclusions = find_exclusions(trajectories, needs_groups=needs_groups)
        remaining = [number for number, place in enumerate(places) if exclusions[place] is None]
        if len(remaining) < len(places):
            experience = experience.select(experience.rows_of(remaining))
        return StepBatch(
            experience=experience, trajectories=trajectories, exclusions=exclusions, timing=timing
        )

    def credit(self, experience: Experience) -> tuple[Experience, dict[str, Metric]]:
        """Return the rows to train on, including r_t, Â_t and Ĝ_t, and the batch's metrics.

        With --algo.loss.mask_truncated, truncated samples count in the metrics, in their prompts'
        baselines and in whitening, but are removed from the rows, so they enter neither the
        numerator nor the denominator of any loss.  DAPO, section 3.4, arXiv:2503.14476 (overlong
        filtering)
        """
        algo = self.config.algo
        advantage = algo.advantage
        estimator = ADVANTAGE_ESTIMATORS[advantage.estimator]
        assert experience.values is not None or not estimator.traits.needs_critic
        rewards = self._penalised(experience)
        # Each episode counts once in a baseline, even if it has several conversations.
        once = experience.last_rows
        try:
            shaped = shape_rewards(rewards[once], experience.group_ids[once], estimator)
        except EstimatorError as error:
            raise UserError(f"--algo.advantage.estimator {advantage.estimator}: {error}") from error
        shaped = clip_rewards(shaped, *self.config.reward.clip_range)[experience.episode_of_row]
        kl, metrics = self._reward_kl(experience)
        columns = self._assign_credit(experience, shaped, kl)
        scale = not advantage.no_std_norm
        columns["advantages"] = normalize_advantages(
            columns["advantages"], experience.action_mask, estimator, scale=scale
        )
        if experience.teacher_logprobs is not None:
            gap = self._teacher_kl(experience)
            columns["advantages"] -= algo.distill.coef * gap
            metrics["train/teacher_kl"] = mean_of(gap, float(experience.action_mask.sum()))
        credited = replace(experience, rewards=rewards, **columns)
        metrics |= self._metrics(credited)
        if algo.loss.mask_truncated:
            credited = credited.select(torch.nonzero(~credited.truncated).flatten().tolist())
        return credited, metrics

    def _assign_credit(
        self, experience: Experience, shaped: Tensor, kl: Tensor
    ) -> dict[str, Tensor]:
        """Return the columns r_t, Â_t (not yet normalized) and Ĝ_t, all (N,).

        `shaped` (B,) has the shaped reward of each row; `kl` (N,) has the estimate of the KL
        penalty.
        """
        advantage = self.config.algo.advantage
        estimator = ADVANTAGE_ESTIMATORS[advantage.estimator]
        names = ("token_rewards", "advantages", "returns")
        columns = {name: torch.zeros(experience.num_tokens) for name in names}
        zeros = torch.zeros(experience.num_tokens)
        turns = experience.turn_rewards
        # Estimators that compare entire samples ignore the rewards of individual turns.
        if turns is None or estimator.traits.per_episode:
            turns = zeros
        values = experience.values
        if values is None:
            values = zeros
        for rows in experience.similar_rows(BLOCK_TOKENS):
            block = Layout.of(experience.offsets, rows)
            mask = block.pad(experience.action_mask)
            per_token = token_rewards(
                shaped[rows], block.pad(kl), mask, self.kl.coef, block.pad(turns)
            )
            advantages, returns = estimator.credit(
                per_token, block.pad(values), mask, gamma=advantage.gamma, lam=advantage.lambd
            )
            block.scatter(per_token, columns["token_rewards"])
            block.scatter(advantages, columns["advantages"])
            block.scatter(returns, columns["returns"])
        return columns

    def _teacher_kl(self, experience: Experience) -> Tensor:
        """Return log π_old − log π_teacher of each sampled token (N,), the value to minimize.

        The value is the token's contribution to KL(π ‖ teacher). Only the token itself gets credit,
        not earlier tokens. Lu et al. 2025, On-Policy Distillation,
        thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al. 2024, arXiv:2306.13649
        """
        assert experience.old_logprobs is not None and experience.teacher_logprobs is not None
        gap = kl_estimate(experience.old_logprobs, experience.teacher_logprobs, "k1")
        return gap * experience.action_mask

    def _penalised(self, experience: Experience) -> Tensor:
        """Return the rewards (B,) after the length penalties, logged as `train/reward`."""
        flags = self.config.reward
        rewards = experience.rewards
        if flags.overlong_buffer_len is not None:
            prompts = experience.lengths - experience.num_actions
            penalties = overlong_penalty(
                experience.num_actions,
                max_length=self.config.rollout.max_new_tokens or self.config.data.max_len - prompts,
                buffer=flags.overlong_buffer_len,
                factor=flags.overlong_penalty_factor,
            )
            # An episode gets the penalty of its longest conversation.
            episodes = experience.episode_of_row
            worst = penalties.scatter_reduce(0, episodes, penalties, "amin", include_self=False)
            rewards = rewards + worst[episodes]
        if flags.stop_properly_penalty_coef is not None:
            rewards = stop_properly_penalty(
                rewards, experience.truncated, flags.stop_properly_penalty_coef
            )
        return rewards

    def _reward_kl(self, experience: Experience) -> tuple[Tensor, dict[str, Metric]]:
        """Return the per-token KL between π_old and π_ref (N,), and its metrics.

        Returns zeros and no metrics if the reward has no KL term.
        """
        kl = self.config.algo.kl
        old, reference = experience.old_logprobs, experience.ref_logprobs
        if not kl.in_reward or reference is None:
            return torch.zeros(experience.num_tokens), {}
        assert old is not None
        column = kl_estimate(old, reference, kl.estimator)
        return column, kl_metrics(column, old - reference, experience.action_mask)

    def _metrics(self, experience: Experience) -> dict[str, Metric]:
        once = experience.last_rows
        episodes = len(once)
        rows = experience.num_rows
        assert experience.token_rewards is not None
        full = experience.lengths >= self.config.data.max_len
        metrics: dict[str, Metric] = {
            "train/reward": mean_of(experience.rewards[once], episodes),
            "train/return": mean_of(experience.token_rewards, rows),
            "train/response_length": mean_of(experience.num_actions, episodes),
            "train/total_length": Mean(experience.num_tokens, episodes),
            "train/truncated": mean_of(experience.truncated[once], episodes),
            "train/response_clip_ratio": mean_of(full, rows),
        }
        return metrics | group_metrics(experience.rewards[once], experience.group_ids[once])


def group_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Metric]:
    """Return metrics on how much rewards vary among samples of the same prompt.

    The metrics are averaged over the prompts with at least two samples.
    """
    stats = group_statistics(rewards, groups)
    weights = (stats.size > 1) / stats.size  # the weights sum to 1 within each group
    number = float(weights.sum())
    if not number:
        return {}
    return {
        "train/group_reward_std": mean_of(stats.std * weights, number),
        "train/dead_groups": mean_of(weights[stats.std == 0], number),
    }
