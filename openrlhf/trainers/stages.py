"""Model-computed rewards and per-token columns for finished episodes.

The same stages process a step's batch, the samples of one prompt (for dynamic filtering and
asynchronous runs), and the episodes of an evaluation. Columns stay tensors from the worker to the
batch.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.cluster.worker_group import WorkerGroup, wait_for
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.batches import Experience, Ragged, reward_columns
from openrlhf.core.trajectory import Trajectory
from openrlhf.data.batching import row_costs
from openrlhf.observability.metrics import Last, Metric
from openrlhf.rewards.protocol import combined
from openrlhf.trainers.update_plan import distribute
from openrlhf.workers.frozen import RewardWorker


@dataclass(eq=False, repr=False)
class EpisodeRows:
    """Finished episodes, with their rows and the columns computed so far.

    There is one row per conversation: first the conversations of the first episode, then the
    conversations of the second episode, and so on. By default, the rows are built from the episodes
    when a stage first reads them, because rewards from a function alone do not need rows.
    """

    episodes: list[Trajectory]
    _rows: Experience | None = None

    @property
    def rows(self) -> Experience:
        """The rows, with the columns that all episodes already have."""
        if self._rows is None:
            self._rows = Experience.from_trajectories(self.episodes)
        return self._rows

    def with_column(self, name: str, column: Tensor) -> "EpisodeRows":
        """Return the same episodes with a per-token column (N,) added to their rows."""
        return EpisodeRows(self.episodes, replace(self.rows, **{name: column}))

    def with_episodes(self, episodes: list[Trajectory]) -> "EpisodeRows":
        """Return the same rows with the current rewards of `episodes`.

        Rows of failed episodes get a reward of NaN.
        """
        if self._rows is None:
            return EpisodeRows(episodes)
        return EpisodeRows(episodes, replace(self._rows, **reward_columns(episodes)))

    def episodes_with(self, columns: Sequence[str]) -> list[Trajectory]:
        """Return the episodes, with each conversation's slice of the named columns attached."""
        parts = {name: iter(self.rows.parts(getattr(self.rows, name))) for name in columns}
        done: list[Trajectory] = []
        for episode in self.episodes:
            conversations: list[Trajectory] = []
            for conversation in episode.conversations:
                own = {name: next(rows) for name, rows in parts.items()}
                conversations.append(replace(conversation, columns={**conversation.columns, **own}))
            done.append(replace(conversations[-1], earlier=tuple(conversations[:-1])))
        return done


# Waits (at most the given seconds) for a stage's result; returns the batch with the result added.
Add = Callable[[EpisodeRows, float], EpisodeRows]


class Stage(Protocol):
    """Rewards or a per-token column, computed by models."""

    @property
    def writes(self) -> str | None:
        """The `Experience` column to write, or None for rewards, which belong to the episodes."""

    @property
    def by(self) -> object | None:
        """The workers or the server that compute the result, or None if no model is called."""

    def launch(self, batch: EpisodeRows) -> Add:
        """Start the computation.

        Return a function that waits for the result and adds it to the rows.
        """
        ...


def run_stages(
    batch: EpisodeRows, stages: Sequence[Stage], timeout_s: float
) -> tuple[EpisodeRows, dict[str, Metric]]:
    """Launch all stages, then collect their results in order.

    A stage whose column is already present (asynchronous runs) is not launched.
    Each timing metric is the number of seconds until its stage's result arrives. It is named after
    the stage's column, or `reward_models`.
    """
    start = time.perf_counter()
    timing: dict[str, Metric] = {}
    launched: list[tuple[Stage, Add]] = []
    for stage in stages:
        if stage.writes is None or getattr(batch.rows, stage.writes) is None:
            launched.append((stage, stage.launch(batch)))
    for stage, add in launched:
        batch = add(batch, timeout_s)
        if stage.by:
            name = stage.writes or "reward_models"
            timing[f"timing/{name}"] = Last(time.perf_counter() - start)
    return batch, timing


def launch_scoring(
    batch: Ragged,
    workers: WorkerGroup,
    method: Callable[..., Tensor],
    *,
    per_row: bool = False,
) -> Callable[[float], Tensor]:
    """Start scoring a batch, and return a function that waits for the resulting column or matrix.

    The returned function takes a timeout in seconds. The result has a value per token (N,), or one
    or several values per row: (B,) or (B, K). The rows are split into data slices, and the results
    are put back in row order.
    """
    costs = row_costs(batch.lengths.tolist(), workers.attention_length)
    # A slice without rows gets the first row, because some forward passes are collective.
    # The extra row does not change the result.
    parts = [rows or [0] for rows in distribute(costs, range(len(costs)), workers.slices)]
    calls = workers.launch(method, batch.split(parts))

    def collect(timeout_s: float) -> Tensor:
        doing = f"score the batch ({workers.role})"
        results: Sequence[Tensor] = wait_for(calls, timeout_s=timeout_s, doing=doing)
        size = batch.num_rows if per_row else batch.num_tokens
        column = torch.zeros(size, *results[0].shape[1:])
        for rows, scored in zip(parts, results, strict=True):
            if per_row:
                column[rows] = scored
            else:
                column[batch.places_of(rows)] = scored
        return column

    return collect


@dataclass(frozen=True, kw_only=True)
class ColumnStage:
    """A per-token column computed by workers.

    `inputs` returns the batch to send to the workers, with only the columns that the workers need.
    """

    writes: str
    by: WorkerGroup
    method: Callable[..., Tensor]
    inputs: Callable[[Experience], Ragged] = Experience.targets

    def launch(self, batch: EpisodeRows) -> Add:
        """Send the rows to the ranks."""
        collect = launch_scoring(self.inputs(batch.rows), self.by, self.method)
        return lambda batch, timeout_s: batch.with_column(self.writes, collect(timeout_s))


@dataclass(frozen=True, kw_only=True)
class RewardStage:
    """The rewards from reward models, if there are any.

    The result is a weighted sum of the models' rewards and the reward function's rewards, with
    weights from the flags.
    """

    by: WorkerGroup | None
    reward: RewardConfig
    writes: None = None

    def launch(self, batch: EpisodeRows) -> Add:
        """Score each episode with each model. The models are run on the last conversation."""
        rows: Experience | None = None
        whole = None  # a reward per row from each reward model
        by_token = None  # a reward per token from the process reward model
        if self.by:
            rows = batch.rows.select(batch.rows.last_rows)
            if self.reward.scalars:
                whole = launch_scoring(rows.texts(), self.by, RewardWorker.rewards, per_row=True)
            if self.reward.process_model:
                by_token = launch_scoring(rows.targets(), self.by, RewardWorker.step_rewards)

        def add(batch: EpisodeRows, timeout_s: float) -> EpisodeRows:
            by_models: list[list[float]] = [[]] * len(batch.episodes)
            by_steps: list[list[float]] = [[]] * len(batch.episodes)
            if whole:
                by_models = whole(timeout_s).tolist()
            if by_token and rows:
                by_steps = [part.tolist() for part in rows.parts(by_token(timeout_s))]
            weights = self.reward.weights or ()
            scored = zip(batch.episodes, by_models, by_steps, strict=True)
            return batch.with_episodes(
                [combined(episode, models, weights, steps) for episode, models, steps in scored]
            )

        return add


@dataclass(frozen=True, kw_only=True)
class EarlyStages:
    """Stages that can run on the samples of one prompt as soon as these samples have finished."""

    stages: Sequence[Stage]
    timeout_s: float

    async def score_group(self, group: list[Trajectory]) -> list[Trajectory]:
        """Score the samples of one prompt while other prompts are still being sampled."""
        return await asyncio.to_thread(self.score, group)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes, with rewards and columns added to all episodes that did not fail."""
        finished = [trajectory for trajectory in trajectories if not trajectory.failed]
        if not finished:
            return list(trajectories)
        batch, _ = run_stages(EpisodeRows(finished), self.stages, self.timeout_s)
        columns = [stage.writes for stage in self.stages if stage.writes]
        in_order = iter(batch.episodes_with(columns))
        return [each if each.failed else next(in_order) for each in trajectories]
