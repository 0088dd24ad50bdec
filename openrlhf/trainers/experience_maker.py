"""From finished episodes to a batch that can be learned from: remote forwards first, then pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    assign_credit,
    group_statistics,
    normalize_advantages,
    shape_rewards,
)
from openrlhf.algorithms.kl import KLController, kl_estimate
from openrlhf.algorithms.rewards import clip_rewards, overlong_penalty, stop_properly_penalty, token_rewards
from openrlhf.batches import Experience, Layout
from openrlhf.distributed.worker_group import WorkerGroup, gather
from openrlhf.observability.metrics import Last, Mean, Metric
from openrlhf.rewards.sums import combined
from openrlhf.trainers.remote_teacher import RemoteTeacher
from openrlhf.trainers.update_plan import share
from openrlhf.trajectory import Trajectory
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker, RewardWorker
from openrlhf.workers.policy import PolicyWorker, kl_metrics


@dataclass(frozen=True, kw_only=True)
class CreditSettings:
    """How rewards become advantages. Built from the flags."""

    estimator: str
    gamma: float
    lam: float
    scale_advantages: bool  # divide by the standard deviation where the estimator whitens
    kl_estimator: str
    kl_in_reward: bool
    distill_coef: float  # of the teacher, where there is one
    reward_clip: tuple[float, float]
    overlong_buffer: float | None  # tokens
    overlong_factor: float
    stop_properly: float | None
    max_new_tokens: int | None
    max_len: int  # tokens


class ExperienceMaker:
    """Annotates a batch with what the workers know, and credits its tokens.

    `recompute_old`: π_old is computed by the trainer before the update; without it the update takes its own log-probabilities.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        reference: WorkerGroup | None,
        critic: WorkerGroup | None,
        teacher: WorkerGroup | None,
        settings: CreditSettings,
        kl: KLController,
        *,
        recompute_old: bool,
        timeout_s: float,
        remote_teacher: RemoteTeacher | None = None,
    ) -> None:
        self.policy, self.reference = policy, reference
        self.critic, self.teacher, self.remote_teacher = critic, teacher, remote_teacher
        self.settings, self.kl = settings, kl
        self.recompute_old, self.timeout_s = recompute_old, timeout_s

    def taught(self, trajectories: Sequence[Trajectory]) -> tuple[Sequence[Trajectory], dict[str, Metric]]:
        """The episodes, those to be trained on with what a remote teacher says of them, where there is one; how long it took."""
        if self.remote_teacher is None:
            return trajectories, {}
        start = time.perf_counter()
        taught = self.remote_teacher.taught(trajectories)
        return taught, {"timing/teacher_logprobs": Last(time.perf_counter() - start)}

    def annotate(self, experience: Experience) -> tuple[Experience, dict[str, Metric]]:
        """Add log π_old, log π_ref, log π_teacher and V where something needs them: launched side by side, gathered.

        The metrics tell how long each took; a pass that nothing needs is not run and has none.
        """
        columns: dict[str, _Pending] = {}
        if self.recompute_old:
            columns["old_logprobs"] = _Pending(experience, self.policy, PolicyWorker.logprobs)
        if self.reference:
            columns["ref_logprobs"] = _Pending(experience, self.reference, ReferenceWorker.logprobs)
        if self.teacher:
            columns["teacher_logprobs"] = _Pending(experience, self.teacher, ReferenceWorker.logprobs)
        if self.critic:
            columns["values"] = _Pending(experience, self.critic, CriticWorker.values)
        start, timing = time.perf_counter(), dict[str, Metric]()
        for name, pending in columns.items():
            experience = experience.with_columns(**{name: pending.collect(self.timeout_s)})
            timing[f"timing/{name}"] = Last(time.perf_counter() - start)
        return experience, timing

    def credit(self, experience: Experience) -> tuple[Experience, dict[str, Metric]]:
        """r_t, Â_t and Ĝ_t, and the metrics of the batch."""
        estimator = ADVANTAGE_ESTIMATORS[self.settings.estimator]
        rewards = self._penalised(experience)
        shaped = clip_rewards(shape_rewards(rewards, experience.group_ids, estimator), *self.settings.reward_clip)
        kl = self._reward_kl(experience)
        columns = {name: torch.zeros(experience.num_tokens) for name in ("token_rewards", "advantages", "returns")}
        row_of_token = experience.sample_of_token()
        for block in experience.blocks():
            rows = row_of_token[block.positions[:, 0]]
            mask = block.gather(experience.action_mask)
            turns = experience.turn_rewards if not estimator.per_group else None
            per_token = token_rewards(
                shaped[rows],
                None if kl is None else block.gather(kl),
                mask,
                self.kl.coef,
                None if turns is None else block.gather(turns),
            )
            advantages, returns = assign_credit(
                estimator,
                per_token,
                mask,
                values=None if experience.values is None else block.gather(experience.values),
                gamma=self.settings.gamma,
                lam=self.settings.lam,
            )
            for name, values in zip(columns, (per_token, advantages, returns), strict=True):
                block.scatter(values, columns[name])
        columns["advantages"] = normalize_advantages(
            columns["advantages"], experience.action_mask, estimator, scale=self.settings.scale_advantages
        )
        metrics: dict[str, Metric] = {}
        if experience.teacher_logprobs is not None:
            gap = self._teacher_kl(experience)
            columns["advantages"] -= self.settings.distill_coef * gap
            metrics["train/teacher_kl"] = Mean(float(gap.sum()), float(experience.action_mask.sum()))
        credited = experience.with_columns(rewards=rewards, **columns)
        return credited, metrics | self._metrics(credited, kl)

    def _teacher_kl(self, experience: Experience) -> Tensor:
        """log π_old − log π_teacher of every sampled token: its share of KL(π ‖ teacher), which distillation lowers.

        It is credited to the token itself and to none before it.  Lu et al. 2025, On-Policy Distillation,
        thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al. 2024, arXiv:2306.13649
        """
        assert experience.old_logprobs is not None and experience.teacher_logprobs is not None
        return kl_estimate(experience.old_logprobs, experience.teacher_logprobs, "k1") * experience.action_mask

    def _penalised(self, experience: Experience) -> Tensor:
        """Rewards after the length penalties; what the log calls reward."""
        settings, rewards = self.settings, experience.rewards
        if settings.overlong_buffer is not None:
            prompts = experience.lengths - experience.num_actions
            longest = settings.max_new_tokens or settings.max_len - prompts
            rewards = rewards + overlong_penalty(
                experience.num_actions,
                max_length=longest,
                buffer=settings.overlong_buffer,
                factor=settings.overlong_factor,
            )
        if settings.stop_properly is not None:
            rewards = stop_properly_penalty(rewards, experience.truncated, settings.stop_properly)
        return rewards

    def _reward_kl(self, experience: Experience) -> Tensor | None:
        """KL per token from the rollout, where it enters the reward: log π_old against log π_ref."""
        if not self.settings.kl_in_reward or experience.ref_logprobs is None:
            return None
        assert experience.old_logprobs is not None
        return kl_estimate(experience.old_logprobs, experience.ref_logprobs, self.settings.kl_estimator)

    def _metrics(self, experience: Experience, kl: Tensor | None) -> dict[str, Metric]:
        count, actions = experience.num_samples, experience.num_actions
        mask = experience.action_mask
        assert experience.token_rewards is not None
        metrics: dict[str, Metric] = {
            "train/reward": Mean(float(experience.rewards.sum()), count),
            "train/return": Mean(float(experience.token_rewards.sum()), count),
            "train/response_length": Mean(float(actions.sum()), count),
            "train/total_length": Mean(float(experience.num_tokens), count),
            "train/truncated": Mean(float(experience.truncated.sum()), count),
            "train/response_clip_ratio": Mean(float((experience.lengths >= self.settings.max_len).sum()), count),
        }
        metrics |= group_metrics(experience.rewards, experience.group_ids)
        if kl is not None:
            assert experience.old_logprobs is not None and experience.ref_logprobs is not None
            metrics |= kl_metrics(kl, experience.old_logprobs - experience.ref_logprobs, mask)
        return metrics


def with_rewards(
    trajectories: Sequence[Trajectory], models: WorkerGroup | None, weights: Sequence[float], *, timeout_s: float
) -> list[Trajectory]:
    """The episodes, the finished ones with the sum of all their rewards: those of reward models, and the rule's they came with."""
    finished = [t for t in trajectories if not t.failed]
    scores: list[list[float]] = [[] for _ in finished]
    if models and finished:
        batch = Experience.from_trajectories(finished)
        scores = _Pending(batch, models, RewardWorker.rewards, per_sample=True).collect(timeout_s).tolist()
    by_models = iter(scores)
    return [t if t.failed else combined(t, next(by_models), weights) for t in trajectories]


def group_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Metric]:
    """How the rewards of a prompt's samples differ, as means over the prompts with two samples or more."""
    stats = group_statistics(rewards, groups)
    share_of_group = (stats.size > 1) / stats.size  # the samples of a group count as one
    number = float(share_of_group.sum())
    if not number:
        return {}
    return {
        "train/group_reward_std": Mean(float((stats.std * share_of_group).sum()), number),
        "train/dead_groups": Mean(float(share_of_group[stats.std == 0].sum()), number),
    }


class _Pending:
    """A column (or several, as a matrix) on its way: rows scattered over the ranks of a group, results gathered back into place."""

    def __init__(
        self, experience: Experience, group: WorkerGroup, method: Callable[..., Tensor], *, per_sample: bool = False
    ) -> None:
        self.experience, self.group, self.per_sample = experience, group, per_sample
        lengths = experience.lengths.tolist()
        # A rank without rows repeats the first one: some forwards are collective. Its result is the same number twice.
        self.parts = [rows or [0] for rows in share(lengths, range(len(lengths)), group.slices)]
        self.references = group.launch(method, experience.split(self.parts))

    def collect(self, timeout_s: float) -> Tensor:
        """(N,) where ranks gave their tokens numbers; (B,) or (B, K) where they gave their rows numbers."""
        results: Sequence[Tensor] = gather(
            self.references, timeout_s=timeout_s, doing=f"score the batch ({self.group.role})", logs=self.group.logs
        )
        size = self.experience.num_samples if self.per_sample else self.experience.num_tokens
        column = torch.zeros(size, *results[0].shape[1:])
        for rows, scored in zip(self.parts, results, strict=True):
            index = torch.tensor(rows)
            if not self.per_sample:
                place = Layout.of(self.experience.offsets, index)
                index = place.positions[place.real]
            column[index] = scored
        return column
