"""Columns that workers compute: the workers and inputs of each column, and the transport of its
rows.
"""

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
    """A column, or a matrix of several, on its way: rows cut into data slices, results put back in
    place.
    """

    def __init__(
        self,
        batch: Ragged,
        group: WorkerGroup,
        method: Callable[..., Tensor],
        *,
        per_sample: bool = False,
    ) -> None:
        self.batch, self.group, self.per_sample = batch, group, per_sample
        lengths = batch.lengths.tolist()
        # A slice without rows repeats the first row, because some forwards are collective. The
        # result is the same.
        self.parts = [rows or [0] for rows in share(lengths, range(len(lengths)), group.slices)]
        self.calls = group.launch(method, batch.split(self.parts))

    def collect(self, timeout_s: float) -> Tensor:
        """(N,) if workers gave every token a number; (B,) or (B, K) if they gave every row numbers."""
        doing = f"score the batch ({self.group.role})"
        results: Sequence[Tensor] = gather(self.calls, timeout_s=timeout_s, doing=doing)
        size = self.batch.num_samples if self.per_sample else self.batch.num_tokens
        column = torch.zeros(size, *results[0].shape[1:])
        for rows, scored in zip(self.parts, results, strict=True):
            column[rows if self.per_sample else self.batch.places_of(rows)] = scored
        return column


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A per-token column of `Experience`. `writes` is its name; `reads` gives the only columns that
    the workers get.
    """

    writes: str
    by: WorkerGroup
    method: Callable[..., Tensor]
    reads: Callable[[Experience], Ragged] = Experience.targets

    def launch(self, experience: Experience) -> Pending:
        """Send the rows to the ranks. The result is on its way."""
        return Pending(self.reads(experience), self.by, self.method)


class RewardModels:
    """The reward workers, if there are any. Their rewards are added to the reward function's with
    the weights of the flags.
    """

    def __init__(self, workers: WorkerGroup | None, reward: RewardConfig) -> None:
        self.workers, self.reward = workers, reward

    def launch(self, experience: Experience) -> "PendingRewards":
        """The rewards of every model for every episode, on their way. Models read the last
        conversation of an episode.
        """
        whole = steps = None
        if experience.trajectory_ids is not None:
            experience = experience.select(experience.last_rows)
        if self.workers and self.reward.scalars:
            whole = Pending(experience.texts(), self.workers, RewardWorker.rewards, per_sample=True)
        if self.workers and self.reward.process_model:
            steps = Pending(experience.targets(), self.workers, RewardWorker.step_rewards)
        return PendingRewards(whole=whole, steps=steps, weights=self.reward.weights or ())


@dataclass(frozen=True, kw_only=True)
class PendingRewards:
    """The rewards of models on their way: of whole episodes (B, K), and of steps (N,)."""

    whole: Pending | None
    steps: Pending | None
    weights: Sequence[float]

    def added_to(self, trajectories: Sequence[Trajectory], timeout_s: float) -> list[Trajectory]:
        """The episodes with the weighted sum of these rewards and their own."""
        whole, steps = [[] for _ in trajectories], [[] for _ in trajectories]
        if self.whole:
            whole = self.whole.collect(timeout_s).tolist()
        if self.steps:
            steps = [
                row.tolist()
                for row in self.steps.collect(timeout_s).split(self.steps.batch.lengths.tolist())
            ]
        rows = zip(trajectories, whole, steps, strict=True)
        return [combined(t, by_models, self.weights, by_steps) for t, by_models, by_steps in rows]


@dataclass(frozen=True, kw_only=True)
class EarlyStages:
    """Rewards of models and columns that need no samples of other prompts."""

    models: RewardModels
    stages: Sequence[Stage] = ()
    timeout_s: float

    async def of_group(self, group: list[Trajectory]) -> list[Trajectory]:
        """`annotated` for the samples of one prompt, while other prompts are still being sampled."""
        return await asyncio.to_thread(self.annotated, group)

    def annotated(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The episodes; finished ones have the sum of all their rewards, and the columns. Workers
        compute side by side.
        """
        finished = [t for t in trajectories if not t.failed]
        if not finished:
            return list(trajectories)
        experience = Experience.from_trajectories(
            finished if self.models.workers or self.stages else []
        )  # for workers
        rewards = self.models.launch(experience)
        pending = {stage.writes: stage.launch(experience) for stage in self.stages}
        done = rewards.added_to(finished, self.timeout_s)
        for name, column in pending.items():
            rows = column.collect(self.timeout_s).split(experience.lengths.tolist())
            done = with_column(done, name, [row.tolist() for row in rows])
        of = {id(before): after for before, after in zip(finished, done, strict=True)}
        return [of.get(id(t), t) for t in trajectories]


def with_column(
    trajectories: Sequence[Trajectory], name: str, rows: Sequence[Sequence[float]]
) -> list[Trajectory]:
    """Return the episodes with a column for every conversation; `rows` has them in order."""
    left = iter(rows)
    done: list[Trajectory] = []
    for trajectory in trajectories:
        conversations = [
            replace(conversation, columns={**conversation.columns, name: next(left)})
            for conversation in trajectory.conversations
        ]
        done.append(replace(conversations[-1], earlier=tuple(conversations[:-1])))
    return done
