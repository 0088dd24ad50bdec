"""Batches of token sequences, flat: per-token columns (N,), per-sample columns (B,), offsets
(B+1,).

Nothing is padded until a model or a formula needs a block, so a batch costs what its tokens cost.
The role of a field is in its metadata: select, split and move read it. `Layout` turns columns into
(R, T) blocks and back.
"""

# ruff: noqa: RUF009 — `per_token` and `per_sample` are `dataclasses.field` under names that say the role.
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Self, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openrlhf.core.trajectory import Trajectory

PER_TOKEN, PER_SAMPLE, OFFSETS = "token", "sample", "offsets"


def per_token(**kwargs: Any) -> Any:
    """A dataclass field of shape (N,), on the axis of `tokens`."""
    return field(metadata={"role": PER_TOKEN}, **kwargs)


def per_sample(**kwargs: Any) -> Any:
    """A dataclass field of shape (B,)."""
    return field(metadata={"role": PER_SAMPLE}, **kwargs)


def offsets_of(lengths: Sequence[int] | Tensor) -> Int[Tensor, " B+1"]:
    """The start of each sequence, and the end of the last one: lengths [2, 3] -> [0, 2, 5]."""
    ends = torch.as_tensor(lengths, dtype=torch.long).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


@dataclass(frozen=True)
class Layout:
    """The places of the tokens of some rows: gathers flat columns into (R, T) blocks and scatters
    blocks back.
    """

    positions: Int[Tensor, "R T"]  # index into the flat column, 0 at padding
    real: Bool[Tensor, "R T"]  # False at padding

    @classmethod
    def of(cls, offsets: Int[Tensor, " B+1"], rows: Tensor | None = None) -> Self:
        """The layout of `rows` (all by default), right-padded to the longest of them."""
        starts, lengths = offsets[:-1], offsets.diff()
        if rows is not None:
            starts, lengths = starts[rows], lengths[rows]
        width = int(lengths.max()) if len(lengths) else 0
        steps = torch.arange(width, device=offsets.device)
        real = steps < lengths[:, None]
        return cls(positions=torch.where(real, starts[:, None] + steps, 0), real=real)

    def gather(self, column: Tensor) -> Tensor:
        """Flat (N,) -> block (R, T), zero (False) at padding. Differentiable."""
        block = column[self.positions]
        return block & self.real if block.dtype == torch.bool else block.masked_fill(~self.real, 0)

    def scatter(self, block: Tensor, column: Tensor) -> None:
        """Write the real entries of a block (R, T) to their places in the flat column (N,)."""
        column[self.positions[self.real]] = block[self.real].to(column.dtype)


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Token sequences of different lengths, flat: the base of every batch.

    Raises ValueError for a column of the wrong length.
    """

    tokens: Int[Tensor, " N"] = per_token()
    offsets: Int[Tensor, " B+1"] = field(metadata={"role": OFFSETS})

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], **columns: Tensor | None) -> Self:
        """The token sequences of a list, with their other columns."""
        return cls(
            tokens=_flat(rows, torch.long),
            offsets=offsets_of([len(row) for row in rows]),
            **columns,
        )

    def __post_init__(self) -> None:
        expected = {PER_TOKEN: int(self.offsets[-1]), PER_SAMPLE: len(self.offsets) - 1}
        for f, column in self._columns():
            if len(column) != expected[f.metadata["role"]]:
                raise ValueError(
                    f"{type(self).__name__}.{f.name} has {len(column)} entries, but the offsets "
                    f"describe {expected[PER_SAMPLE]} sequences with {expected[PER_TOKEN]} tokens"
                )

    def _columns(self) -> Iterator[tuple[Field[Any], Tensor]]:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("role") in (PER_TOKEN, PER_SAMPLE) and value is not None:
                yield f, value

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Number of tokens of each sequence."""
        return self.offsets.diff()

    @property
    def layout(self) -> Layout:
        """The padded layout of all rows."""
        return Layout.of(self.offsets)

    def sample_of_token(self) -> Int[Tensor, " N"]:
        """The row that each token belongs to."""
        rows = torch.arange(self.num_samples, device=self.offsets.device)
        return rows.repeat_interleave(self.lengths)

    def similar_rows(
        self, max_tokens: int, *, max_rows: int | None = None, padded: bool = True
    ) -> Iterator[Int[Tensor, " M"]]:
        """The numbers of all rows, in parts of similar lengths: at most `max_tokens` and
        `max_rows`, or a single row.

        `padded`: a row counts as many tokens as the longest row of its part.
        """
        order = self.lengths.argsort()
        while len(order):
            longest_first = self.lengths[order].flip(0)
            costs = longest_first[:1].expand(len(order)) if padded else longest_first
            fitting = int((costs.cumsum(0) <= max_tokens).sum())
            take = min(max(1, fitting), max_rows or len(order))
            yield order[-take:]
            order = order[:-take]

    def blocks(self, max_tokens: int = 1 << 20) -> Iterator[Layout]:
        """Layouts that together have every row once: rows of similar lengths, at most `max_tokens`
        places each.
        """
        return (Layout.of(self.offsets, rows) for rows in self.similar_rows(max_tokens))

    def places_of(self, rows: Sequence[int] | Tensor) -> Int[Tensor, " M"]:
        """The places of the tokens of some rows in the flat columns, row after row."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.offsets.device)
        lengths = self.lengths[index]
        shift = self.offsets[:-1][index] - offsets_of(lengths)[:-1]
        return torch.arange(int(lengths.sum()), device=index.device) + shift.repeat_interleave(
            lengths
        )

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order."""
        index, places = torch.as_tensor(rows, dtype=torch.long), self.places_of(rows)
        taken = {
            f.name: column[places if f.metadata["role"] == PER_TOKEN else index]
            for f, column in self._columns()
        }
        return replace(self, offsets=offsets_of(self.lengths[index]), **taken)

    def split(self, partition: Sequence[Sequence[int]]) -> list[Self]:
        """One batch per list of rows."""
        return [self.select(rows) for rows in partition]

    def to(self, device: torch.device | str) -> Self:
        """The same batch with every column on `device`."""
        moved = {f.name: column.to(device, non_blocking=True) for f, column in self._columns()}
        return replace(self, offsets=self.offsets.to(device, non_blocking=True), **moved)


@dataclass(frozen=True, kw_only=True)
class TokenRows(Ragged):
    """Rows of supervised training: `loss_mask[t]` is True if token t is a target."""

    loss_mask: Bool[Tensor, " N"] = per_token()

    @classmethod
    def from_lists(
        cls,
        tokens: Sequence[Sequence[int]],
        loss_mask: Sequence[Sequence[bool]],
        **columns: Tensor | None,
    ) -> Self:
        """One sequence per pair of lists. Raises ValueError if the two have different lengths."""
        if [len(row) for row in tokens] != [len(row) for row in loss_mask]:
            raise ValueError("a row has more tokens than mask entries, or fewer")
        return cls.of(tokens, loss_mask=_flat(loss_mask, torch.bool), **columns)


@dataclass(frozen=True, kw_only=True)
class Answers(TokenRows):
    """Prompts with answers, whose tokens are the targets. `reference`: Σ log π_ref of each answer,
    once it is known.
    """

    reference: Float[Tensor, " B"] | None = per_sample(default=None)
    desirable: Bool[Tensor, " B"] | None = per_sample(
        default=None
    )  # the label of the answer, if it has one

    def answer_sums(self, logprobs: Float[Tensor, " N"]) -> Float[Tensor, " B"]:
        """Σ of a per-token column over the targets of each row."""
        sums = torch.zeros(self.num_samples, dtype=logprobs.dtype, device=logprobs.device)
        return sums.index_add(0, self.sample_of_token(), logprobs.masked_fill(~self.loss_mask, 0))


@dataclass(frozen=True, kw_only=True)
class Steps(Ragged):
    """Texts with labelled steps: at the place of a step its label, elsewhere NaN."""

    labels: Float[Tensor, " N"] = per_token()


@dataclass(frozen=True, kw_only=True)
class Pairs(Ragged):
    """Pairs of sequences: 2i is the chosen and 2i + 1 the rejected one of pair i. Both have the
    margin of the pair.
    """

    margins: Float[Tensor, " B"] = per_sample()


@dataclass(frozen=True, kw_only=True)
class Experience(Ragged):
    """A batch of episodes on its way through annotation, credit assignment and the update.

    A column is None if it has not been computed yet, or if the holder of the batch does not read
    it.
    """

    action_mask: Bool[Tensor, " N"] = per_token()
    group_ids: Int[Tensor, " B"] = per_sample()  # same prompt
    rewards: Float[Tensor, " B"] = per_sample()  # NaN until a reward worker has scored the sample
    truncated: Bool[Tensor, " B"] = per_sample()
    trajectory_ids: Int[Tensor, " B"] | None = per_sample(
        default=None
    )  # same episode; None: every row is an episode

    rollout_logprobs: Float[Tensor, " N"] | None = per_token(default=None)
    turn_rewards: Float[Tensor, " N"] | None = per_token(
        default=None
    )  # parts of the reward, at the ends of turns
    old_logprobs: Float[Tensor, " N"] | None = per_token(default=None)
    ref_logprobs: Float[Tensor, " N"] | None = per_token(default=None)
    teacher_logprobs: Float[Tensor, " N"] | None = per_token(default=None)
    values: Float[Tensor, " N"] | None = per_token(default=None)
    token_rewards: Float[Tensor, " N"] | None = per_token(default=None)
    advantages: Float[Tensor, " N"] | None = per_token(default=None)
    returns: Float[Tensor, " N"] | None = per_token(default=None)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Flatten finished episodes, with the columns that all of them have.

        The group of a sample is the running number of its prompt. An episode of several
        conversations has a row for each, with the episode's reward.
        """
        rows: list[Trajectory] = []
        episodes: list[int] = []  # of each row
        for number, trajectory in enumerate(trajectories):
            rows += trajectory.conversations
            episodes += [number] * len(trajectory.conversations)
        known = [
            name
            for name in (rows[0].columns if rows else ())
            if all(name in row.columns for row in rows)
        ]
        rewards = [float("nan") if t.reward is None else t.reward for t in trajectories]
        by_episode: dict[str, Tensor] = {
            "group_ids": torch.tensor([t.prompt.index for t in trajectories], dtype=torch.long),
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "truncated": torch.tensor([t.truncated for t in trajectories], dtype=torch.bool),
        }
        index = torch.tensor(episodes, dtype=torch.long)
        return cls.of(
            [row.tokens for row in rows],
            action_mask=_flat([row.action_mask for row in rows], torch.bool),
            rollout_logprobs=_flat([row.rollout_logprobs for row in rows], torch.float32),
            turn_rewards=turn_reward_column(trajectories),
            trajectory_ids=index if len(rows) > len(trajectories) else None,
            **{name: column[index] for name, column in by_episode.items()},
            **{name: _flat([row.columns[name] for row in rows], torch.float32) for name in known},
        )

    @property
    def episode_of_row(self) -> Int[Tensor, " B"]:
        """The place of each row's episode among the episodes of the batch."""
        if self.trajectory_ids is None:
            return torch.arange(self.num_samples, device=self.offsets.device)
        untyped = cast(Any, torch)
        return untyped.unique(self.trajectory_ids, return_inverse=True)[1]

    @property
    def last_rows(self) -> Int[Tensor, " E"]:
        """The last row of each episode. Most episodes have only one row."""
        places = self.episode_of_row
        number = int(places.max()) + 1 if len(places) else 0
        rows = torch.arange(self.num_samples, device=places.device)
        return rows.new_zeros(number).scatter_reduce(0, places, rows, "amax", include_self=False)

    def rows_of(self, episodes: Sequence[int]) -> Int[Tensor, " M"]:
        """The rows of some of the batch's episodes, in order."""
        wanted = torch.as_tensor(episodes, dtype=torch.long, device=self.offsets.device)
        return torch.isin(self.episode_of_row, wanted).nonzero().flatten()

    def targets(self) -> TokenRows:
        """The columns from which workers compute log-probabilities of the sampled tokens; nothing
        else is sent.
        """
        return TokenRows(tokens=self.tokens, offsets=self.offsets, loss_mask=self.action_mask)

    def texts(self) -> Ragged:
        """The columns that reward models and critics read."""
        return Ragged(tokens=self.tokens, offsets=self.offsets)

    def only(self, *columns: str) -> Self:
        """The same batch with only these of the columns that may be None."""
        optional = (f.name for f in fields(self) if f.default is None)
        return replace(self, **dict.fromkeys(name for name in optional if name not in columns))

    @property
    def num_actions(self) -> Int[Tensor, " B"]:
        """Number of sampled tokens of each episode."""
        counts = torch.zeros(self.num_samples, dtype=torch.long, device=self.offsets.device)
        return counts.index_add_(0, self.sample_of_token(), self.action_mask.long())


def _flat(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    """Rows one behind the other. Row by row, because a Python loop over the tokens of a large batch
    takes minutes.
    """
    return torch.cat(
        [torch.as_tensor(np.asarray(row), dtype=dtype) for row in rows]
        or [torch.empty(0, dtype=dtype)]
    )


def turn_reward_column(trajectories: Sequence[Trajectory]) -> Float[Tensor, " N"] | None:
    """Each turn's reward at the last token of the turn, zero elsewhere; None if no episode has
    rewards of turns.
    """
    if not any(t.turn_rewards for t in trajectories):
        return None
    rows: list[Trajectory] = []
    for trajectory in trajectories:
        rows += trajectory.conversations
    column = [0.0] * sum(len(row.tokens) for row in rows)
    start = 0
    for row in rows:
        for position, reward in row.turn_rewards:
            column[start + position] += reward
        start += len(row.tokens)
    return torch.tensor(column)
