"""The stages of an RL run: which models score the episodes, and when."""

from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf.cluster.worker_group import WorkerGroup
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.batches import Experience
from openrlhf.launch import settings
from openrlhf.trainers.remote_teacher import RemoteTeacher, RemoteTeacherStage
from openrlhf.trainers.stages import ColumnStage, RewardStage, Stage
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker
from openrlhf.workers.policy import PolicyWorker


@dataclass(frozen=True, kw_only=True)
class RunStages:
    """The stages of a run: the `rewards`, and the `columns` needed by the update."""

    config: PPOConfig
    rewards: RewardStage
    columns: list[Stage]

    @property
    def of_prompt(self) -> list[Stage]:
        """The stages that score the samples of a prompt as soon as they have finished."""
        early: list[Stage] = []
        if self._rewards_come_early:
            early.append(self.rewards)
        if self.config.train.async_enable:
            early += [stage for stage in self.columns if not _asks_policy(stage)]
        return early

    @property
    def of_batch(self) -> list[Stage]:
        """The stages that score a step's batch.

        A column that `of_prompt` has computed is not computed again.
        """
        if self._rewards_come_early:
            return self.columns
        return [self.rewards, *self.columns]

    @property
    def _rewards_come_early(self) -> bool:
        """True if a prompt's samples get their rewards before the batch is complete.

        Dynamic filtering needs the rewards early. In an asynchronous run, scoring overlaps with
        training.
        """
        return self.config.train.async_enable or self.config.algo.dynamic_filtering_enable


def make_stages(config: PPOConfig, groups: Mapping[str, WorkerGroup]) -> RunStages:
    """Return the stages of a run that has the worker groups `groups`, keyed by role."""
    rewards = RewardStage(workers=groups.get("reward"), reward=config.reward)
    return RunStages(config=config, rewards=rewards, columns=column_stages(config, groups))


def column_stages(config: PPOConfig, groups: Mapping[str, WorkerGroup]) -> list[Stage]:
    """Return the stages that compute the columns needed by the update."""
    stages: list[Stage] = []
    policy = groups.get("actor")
    if policy and settings.needs_old_logprobs(config):
        stages.append(ColumnStage(writes="old_logprobs", by=policy, method=PolicyWorker.logprobs))
    if policy and config.algo.kl.init_coef and not config.has_reference:
        method = PolicyWorker.reference_logprobs  # uses the policy with its adapter disabled
        stages.append(ColumnStage(writes="ref_logprobs", by=policy, method=method))
    for role, column in (("ref", "ref_logprobs"), ("teacher", "teacher_logprobs")):
        if role in groups:
            stage = ColumnStage(writes=column, by=groups[role], method=ReferenceWorker.logprobs)
            stages.append(stage)
    if "critic" in groups:
        values = ColumnStage(
            writes="values",
            by=groups["critic"],
            method=CriticWorker.values,
            inputs=Experience.texts,
        )
        stages.append(values)
    if config.remote_teacher:
        stages.append(RemoteTeacherStage(RemoteTeacher.named(config.remote_teacher)))
    return stages


def _asks_policy(stage: Stage) -> bool:
    """Return whether the policy computes this stage's column.

    The policy cannot score rows while it is being updated. π_old is the policy at the start of the
    update. The critic scores samples when they have finished, so V may come from an older critic
    than the one at the start of the update.
    """
    return isinstance(stage, ColumnStage) and stage.by.role == "actor"
