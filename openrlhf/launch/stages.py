"""The stages of an RL run: which models score the episodes, and when."""

from collections.abc import Mapping, Sequence
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
    """The stages of a run."""

    rewards: RewardStage
    of_prompt: Sequence[Stage]  # score the samples of a prompt as soon as they have finished
    of_batch: Sequence[Stage]  # score a step's batch, without the columns of `of_prompt`


def make_stages(config: PPOConfig, groups: Mapping[str, WorkerGroup]) -> RunStages:
    """Return the stages of a run that has the worker groups `groups`, keyed by role.

    Dynamic filtering needs a prompt's rewards before the batch is complete. In an asynchronous run,
    scoring overlaps with training.
    """
    rewards = RewardStage(by=groups.get("reward"), reward=config.reward)
    columns = column_stages(config, groups)
    early: list[Stage] = []
    late = columns
    if config.train.async_enable or config.algo.dynamic_filtering_enable:
        early.append(rewards)
    else:
        late = [rewards, *columns]
    if config.train.async_enable:
        early += [stage for stage in columns if not _asks_policy(stage)]
    return RunStages(rewards=rewards, of_prompt=early, of_batch=late)


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
