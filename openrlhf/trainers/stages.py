"""Rewards and per-token columns that models compute for finished episodes.

The same stages process a step's batch, the samples of one prompt (for dynamic filtering and
asynchronous runs), and the episodes of an evaluation. Columns stay tensors from the worker to the
batch.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.cluster.worker_group import WorkerGroup, gather
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.batches import Experience, Ragged, turn_reward_column
from openrlhf.core.trajectory import Trajectory
from openrlhf.rewards.protocol import combined
from openrlhf.trainers.update_plan import share
from openrlhf.workers.frozen import RewardWorker


class EpisodeRows:
    """Finished episodes, and their rows with the columns computed so far.

    There is one row per conversation: the conversations of the first episode, then those of the
    second, and so on. By default the rows are built from the episodes when a stage first reads
    them, because rewards from a function alone do not need rows.
    """

    def __init__(self, episodes: Sequence[Trajectory], rows: Experience | None = None) -> None:
        self.episodes = list(episodes)
        self._rows = rows

    @property
    def rows(self) -> Experience:
        """The rows, with the columns that all episodes already have."""
        if self._rows is None:
            self._rows = Experience.from_trajectories(self.episodes)
        return self._rows

    def with_column(self, name: str, column: Tensor) -> "EpisodeRows":
        """Return the same episodes with a per-token column (N,) added to their rows."""
        return EpisodeRows(self.episodes, replace(self.rows, **{name: column}))

    def with_episodes(self, episodes: Sequence[Trajectory]) -> "EpisodeRows":
        """Return the same rows with the current rewards of `episodes`.

        Rows of failed episodes get NaN.
        """
        if self._rows is None:
            return EpisodeRows(episodes)
        rewards: list[float] = []
        for episode in episodes:
            rewards.append(math.nan if episode.reward is None else episode.reward)
        rows = replace(
            self._rows,
            rewards=torch.tensor(rewards)[self._rows.episode_of_row],
            turn_rewards=turn_reward_column(episodes),
        )
        return EpisodeRows(episodes, rows)

    def episodes_with(self, columns: Sequence[str]) -> list[Trajectory]:
        """Return the episodes, with each conversation's slice of the named columns attached."""
        parts: dict[str, Sequence[Tensor]] = {}
        for name in columns:
            parts[name] = self.rows.parts(getattr(self.rows, name))
        row = 0
        done: list[Trajectory] = []
        for episode in self.episodes:
            conversations: list[Trajectory] = []
            for conversation in episode.conversations:
                own = {name: part[row] for name, part in parts.items()}
                conversations.append(replace(conversation, columns={**conversation.columns, **own}))
                row += 1
            done.append(replace(conversations[-1], earlier=tuple(conversations[:-1])))
        return done


# Waits for a result, with a timeout in seconds, and returns it together with its episodes and rows.
Add = Callable[[EpisodeRows, float], EpisodeRows]


class Stage(Protocol):
    """Rewards or a column, and the way to compute them with models."""

    @property
    def writes(self) -> str | None:
        """The column of `Experience` to write; None for rewards, which belong to the episodes."""

    @property
    def timing(self) -> str | None:
        """The name of the stage's timing metric; None if no model is called."""

    def launch(self, batch: EpisodeRows) -> Add:
        """Start the computation. Return a function that waits for the result and adds it."""
        ...


def annotate(
    batch: EpisodeRows,
    stages: Sequence[Stage],
    *,
    timeout_s: float,
    finished: Callable[[str], None] = lambda timing: None,
) -> EpisodeRows:
    """Run the stages in parallel and add their results. Skip columns that already exist.

    `finished` is called with the timing name of each stage when its result arrives.
    """
    launched: list[tuple[Stage, Add]] = []
    for stage in stages:
        known = stage.writes is not None and getattr(batch.rows, stage.writes) is not None
        if not known:
            launched.append((stage, stage.launch(batch)))
    for stage, add in launched:
        batch = add(batch, timeout_s)
        if stage.timing:
            finished(stage.timing)
    return batch


class Pending:
    """A column, or a matrix of several columns, that workers are computing.

    The rows are split into data slices, and the results are put back in row order.
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
        # A slice without rows gets the first row, because some forward passes are collective. This
        # does not change the result.
        self.parts = [rows or [0] for rows in share(lengths, range(len(lengths)), group.slices)]
        self.calls = group.launch(method, batch.split(self.parts))

    def collect(self, timeout_s: float) -> Tensor:
        """Return a value per token (N,), or one or several values per row: (B,) or (B, K)."""
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
class ColumnStage:
    """A per-token column that workers compute.

    `reads` returns the batch that is sent to the workers, with only the columns that they need.
    """

    writes: str
    by: WorkerGroup
    method: Callable[..., Tensor]
    reads: Callable[[Experience], Ragged] = Experience.targets

    @property
    def timing(self) -> str:
        """The name of the column."""
        return self.writes

    def launch(self, batch: EpisodeRows) -> Add:
        """Send the rows to the ranks."""
        pending = Pending(self.reads(batch.rows), self.by, self.method)

        def add(batch: EpisodeRows, timeout_s: float) -> EpisodeRows:
            return batch.with_column(self.writes, pending.collect(timeout_s))

        return add


@dataclass(frozen=True, kw_only=True)
class RewardStage:
    """The rewards from reward models, if there are any.

    They are added to the reward function's rewards, with the weights from the flags.
    """

    workers: WorkerGroup | None
    reward: RewardConfig
    writes: None = None

    @property
    def timing(self) -> str | None:
        """`reward_models`, or None if there are no reward models."""
        if self.workers is None:
            return None
        return "reward_models"

    def launch(self, batch: EpisodeRows) -> Add:
        """Score each episode with each model. The models are run on the last conversation."""
        whole = None  # a reward per row from each reward model
        steps = None  # a reward per token from the process reward model
        if self.workers:
            rows = batch.rows
            if rows.trajectory_ids is not None:
                rows = rows.select(rows.last_rows)
            if self.reward.scalars:
                whole = Pending(rows.texts(), self.workers, RewardWorker.rewards, per_sample=True)
            if self.reward.process_model:
                steps = Pending(rows.targets(), self.workers, RewardWorker.step_rewards)

        def add(batch: EpisodeRows, timeout_s: float) -> EpisodeRows:
            by_models: list[list[float]] = [[] for _ in batch.episodes]
            by_steps: list[list[float]] = [[] for _ in batch.episodes]
            if whole:
                by_models = whole.collect(timeout_s).tolist()
            if steps:
                by_steps = [part.tolist() for part in steps.batch.parts(steps.collect(timeout_s))]
            weights = self.reward.weights or ()
            rewarded: list[Trajectory] = []
            for place, episode in enumerate(batch.episodes):
                rewarded.append(combined(episode, by_models[place], weights, by_steps[place]))
            return batch.with_episodes(rewarded)

        return add


@dataclass(frozen=True, kw_only=True)
class EarlyStages:
    """Stages that can run on the samples of one prompt as soon as they have finished."""

    stages: Sequence[Stage]
    timeout_s: float

    async def of_group(self, group: list[Trajectory]) -> list[Trajectory]:
        """Annotate the samples of one prompt while other prompts are still being sampled."""
        return await asyncio.to_thread(self.annotate, group)

    def annotate(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes, with rewards and columns added to those that did not fail."""
        finished = [trajectory for trajectory in trajectories if not trajectory.failed]
        if not finished:
            return list(trajectories)
        batch = annotate(EpisodeRows(finished), self.stages, timeout_s=self.timeout_s)
        columns = [stage.writes for stage in self.stages if stage.writes]
        in_order = iter(batch.episodes_with(columns))
        all_episodes: list[Trajectory] = []
        for trajectory in trajectories:
            all_episodes.append(trajectory if trajectory.failed else next(in_order))
        return all_episodes
