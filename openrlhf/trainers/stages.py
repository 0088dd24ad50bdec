"""Columns that workers compute: who computes each column from what, and how its rows travel."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.cluster.worker_group import WorkerGroup, gather
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.batches import Experience, Ragged
from openrlhf.core.trajectory import Trajectory
from openrlhf.rewards.protocol import combined
from openrlhf.trainers.update_plan import share
from openrlhf.workers.frozen import RewardWorker


class Pending:
    """A column, or a matrix of several, that is being computed.

    The rows are cut into data slices, and the results put back in their places.
    """

    def __init__(
        self,
        batch: Ragged,
        group: WorkerGroup,
        method: Callable[..., Tensor],
        *,
        per_sample: bool = False,
    ) -> None:
        self.batch = batch
        self.group = group
        self.per_sample = per_sample
        lengths = batch.lengths.tolist()
        # A slice without rows repeats the first row, because some forwards are collective. The
        # result is the same.
        self.parts = [rows or [0] for rows in share(lengths, range(len(lengths)), group.slices)]
        self.calls = group.launch(method, batch.split(self.parts))

    def collect(self, timeout_s: float) -> Tensor:
        """Return (N,) if workers give every token a number; (B,) or (B, K) if every row."""
        doing = f"score the batch ({self.group.role})"
        results: Sequence[Tensor] = gather(self.calls, timeout_s=timeout_s, doing=doing)
        size = self.batch.num_samples if self.per_sample else self.batch.num_tokens
        column = torch.zeros(size, *results[0].shape[1:])
        for rows, scored in zip(self.parts, results, strict=True):
            if self.per_sample:
                column[rows] = scored
            else:
                column[self.batch.places_of(rows)] = scored
        return column


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A per-token column of `Experience`: its name, and who computes it.

    `reads` gives the only columns that the workers get.
    """

    writes: str
    by: WorkerGroup
    method: Callable[..., Tensor]
    reads: Callable[[Experience], Ragged] = Experience.targets

    def launch(self, experience: Experience) -> Pending:
        """Send the rows to the ranks, and return the column that they compute."""
        return Pending(self.reads(experience), self.by, self.method)


class RewardModels:
    """The reward workers, if there are any.

    Their rewards are added to the reward function's, with the weights of the flags.
    """

    def __init__(self, workers: WorkerGroup | None, reward: RewardConfig) -> None:
        self.workers = workers
        self.reward = reward

    def launch(self, experience: Experience) -> "PendingRewards":
        """Have every model score every episode. Models read the last conversation of an episode."""
        whole = None
        steps = None
        if experience.trajectory_ids is not None:
            experience = experience.select(experience.last_rows)
        if self.workers and self.reward.scalars:
            whole = Pending(experience.texts(), self.workers, RewardWorker.rewards, per_sample=True)
        if self.workers and self.reward.process_model:
            steps = Pending(experience.targets(), self.workers, RewardWorker.step_rewards)
        return PendingRewards(whole=whole, steps=steps, weights=self.reward.weights or ())


@dataclass(frozen=True, kw_only=True)
class PendingRewards:
    """The rewards that models are computing: of whole episodes (B, K), and of steps (N,)."""

    whole: Pending | None
    steps: Pending | None
    weights: Sequence[float]

    def added_to(self, trajectories: Sequence[Trajectory], timeout_s: float) -> list[Trajectory]:
        """Return the episodes with the weighted sum of these rewards and their own."""
        whole: list[list[float]] = [[] for _ in trajectories]
        steps: list[list[float]] = [[] for _ in trajectories]
        if self.whole:
            whole = self.whole.collect(timeout_s).tolist()
        if self.steps:
            steps = self.steps.batch.cut(self.steps.collect(timeout_s))
        rewarded: list[Trajectory] = []
        for trajectory, by_models, by_steps in zip(trajectories, whole, steps, strict=True):
            rewarded.append(combined(trajectory, by_models, self.weights, by_steps))
        return rewarded


@dataclass(frozen=True, kw_only=True)
class EarlyStages:
    """Rewards of models and columns that need no samples of other prompts."""

    models: RewardModels
    stages: Sequence[Stage] = ()
    timeout_s: float

    async def of_group(self, group: list[Trajectory]) -> list[Trajectory]:
        """Annotate the samples of one prompt while other prompts are still being sampled."""
        return await asyncio.to_thread(self.annotated, group)

    def annotated(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes; finished ones have the sum of their rewards, and the columns.

        Workers compute side by side.
        """
        finished = [trajectory for trajectory in trajectories if not trajectory.failed]
        if not finished:
            return list(trajectories)
        has_workers = self.models.workers or self.stages
        experience = Experience.from_trajectories(finished if has_workers else [])
        rewards = self.models.launch(experience)
        pending = {stage.writes: stage.launch(experience) for stage in self.stages}
        done = rewards.added_to(finished, self.timeout_s)
        for name, column in pending.items():
            rows = experience.cut(column.collect(self.timeout_s))
            done = with_column(done, name, rows)
        in_order = iter(done)
        annotated: list[Trajectory] = []
        for trajectory in trajectories:
            annotated.append(trajectory if trajectory.failed else next(in_order))
        return annotated


def with_column(
    trajectories: Sequence[Trajectory], name: str, rows: Sequence[Sequence[float]]
) -> list[Trajectory]:
    """Return the episodes with a column for every conversation; `rows` has them in order."""
    left = iter(rows)
    done: list[Trajectory] = []
    for trajectory in trajectories:
        conversations: list[Trajectory] = []
        for conversation in trajectory.conversations:
            columns = {**conversation.columns, name: next(left)}
            conversations.append(replace(conversation, columns=columns))
        done.append(replace(conversations[-1], earlier=tuple(conversations[:-1])))
    return done
