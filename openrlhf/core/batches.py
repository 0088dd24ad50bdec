"""Batches of token sequences, stored flat.

A batch of B rows (sequences) with N tokens in total has per-token columns of shape (N,), per-row
columns of shape (B,), and offsets of shape (B+1,). Two rows of 2 and 3 tokens:

    tokens    [11 12 13 14 15]     row i is tokens[offsets[i] : offsets[i + 1]]
    offsets   [0 2 5]
    rewards   [0.5 1.0]

Nothing is padded until a model or a formula needs a block (B, T), so memory and time grow only
with the number of tokens. `Layout` converts columns to blocks and back.

A field's role is in its metadata: one entry per token or one entry per row. An entry may have
additional dimensions: a per-token column of the experts that each layer chose is (N, layers,
experts). `Items` are a per-row column with any number of entries per row, such as image patches (M,
pixels). Checks, `select`, `split` and `to` read the role, so that a subclass only has to declare
its columns.
"""

# ruff: noqa: RUF009 — `per_token` and `per_row` are `dataclasses.field` with a role.
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openrlhf.core.trajectory import Trajectory

PER_TOKEN = "token"
PER_ROW = "row"


def per_token(**kwargs: Any) -> Any:
    """Return a dataclass field for a column of shape (N,)."""
    return field(metadata={"role": PER_TOKEN}, **kwargs)


def per_row(**kwargs: Any) -> Any:
    """Return a dataclass field for a column of shape (B,), or for `Items` with B rows."""
    return field(metadata={"role": PER_ROW}, **kwargs)


per_sample = per_item = per_row  # former names, still supported for plug-in files


def offsets_of(lengths: Sequence[int] | Tensor) -> Int[Tensor, " B+1"]:
    """Return the start of each row, and the end of the last row: [2, 3] → [0, 2, 5]."""
    ends = torch.as_tensor(lengths, dtype=torch.long).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


@dataclass(frozen=True)
class Layout:
    """The flat-column positions of some rows' tokens, as a right-padded block (B, T) of B rows.

    Offsets [0, 2, 5]:

        positions [[0 1 0]    real [[T T F]
                   [2 3 4]]         [T T T]]
    """

    positions: Int[Tensor, "B T"]  # index into a flat column; 0 at padding
    real: Bool[Tensor, "B T"]  # False at padding

    @classmethod
    def of(cls, offsets: Int[Tensor, " B+1"], rows: Tensor | None = None) -> Self:
        """Return the layout of `rows` (B,), by default all rows. T is the longest row's length."""
        starts = offsets[:-1]
        lengths = offsets.diff()
        if rows is not None:
            starts = starts[rows]
            lengths = lengths[rows]
        width = int(lengths.max()) if len(lengths) else 0
        steps = torch.arange(width, device=offsets.device)
        real = steps < lengths[:, None]
        positions = torch.where(real, starts[:, None] + steps, 0)
        return cls(positions=positions, real=real)

    def pad(self, column: Tensor) -> Tensor:
        """Return a flat column (N, ...) as a block (B, T, ...), zero (False) at padding.

        Differentiable.
        """
        block = column[self.positions]
        real = self.real.view(*self.real.shape, *[1] * (block.dim() - 2))
        return block.masked_fill(~real, 0)

    def scatter(self, block: Tensor, column: Tensor) -> None:
        """Write the real entries of a block (B, T) to their positions in a flat column (N,)."""
        column[self.positions[self.real]] = block[self.real].to(column.dtype)


class Column(NamedTuple):
    """A column of a batch that has been computed."""

    name: str
    role: str  # PER_TOKEN or PER_ROW
    values: Any  # a tensor or `Items`


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Rows of different lengths, stored flat: columns and the offsets of the rows in them.

    Raises ValueError if the length of a column does not match the offsets.
    """

    offsets: Int[Tensor, " B+1"]

    def __post_init__(self) -> None:
        expected = {PER_TOKEN: self.num_tokens, PER_ROW: self.num_rows}
        for column in self.present_columns():
            if len(column.values) != expected[column.role]:
                raise ValueError(
                    f"{type(self).__name__}.{column.name} has {len(column.values)} entries, but "
                    f"the offsets describe {self.num_rows} rows with {self.num_tokens} tokens"
                )

    def present_columns(self) -> Iterator[Column]:
        """Yield the columns that are not None. Offsets do not count as a column."""
        for declared in fields(self):
            role = declared.metadata.get("role")
            values = getattr(self, declared.name)
            if role is not None and values is not None:
                yield Column(declared.name, role, values)

    @property
    def num_rows(self) -> int:
        """The number of rows, B."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens, N."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """The number of tokens in each row."""
        return self.offsets.diff()

    def places_of(self, rows: Sequence[int] | Tensor) -> Int[Tensor, " M"]:
        """Return the flat-column positions of the tokens in `rows`, row by row."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.offsets.device)
        lengths = self.lengths[rows]
        starts = self.offsets[:-1][rows]
        shifts = starts - offsets_of(lengths)[:-1]
        steps = torch.arange(int(lengths.sum()), device=rows.device)
        return steps + shifts.repeat_interleave(lengths)

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Return a batch with copies of the given rows in the given order.

        Raises ValueError for a mask, whose entries are not row numbers.
        """
        index = torch.as_tensor(rows)
        if index.dtype == torch.bool:
            raise ValueError("rows must be numbers; for a mask, pass mask.nonzero()[:, 0]")
        index = index.long()
        places = {PER_ROW: index, PER_TOKEN: self.places_of(index)}
        selected: dict[str, Tensor | Items] = {}
        for column in self.present_columns():
            selected[column.name] = column.values[places[column.role]]
        return replace(self, offsets=offsets_of(self.lengths[index]), **selected)

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch with every column on `device`."""
        moved: dict[str, Any] = {"offsets": self.offsets.to(device)}
        for column in self.present_columns():
            moved[column.name] = column.values.to(device)
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Items(Flat):
    """Entries that belong to rows, such as image patches. A row may have any number of entries.

    `values` is (M, ...); row i has values[offsets[i] : offsets[i + 1]].
    """

    values: Tensor = per_token()

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: Tensor) -> Self:
        return self.select(rows)


@dataclass(frozen=True, kw_only=True)
class Ragged(Flat):
    """Token rows of different lengths: the base class of every batch."""

    tokens: Int[Tensor, " N"] = per_token()

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], **columns: Tensor | None) -> Self:
        """Return a batch of the given token rows. The other columns must already be flat."""
        lengths = [len(row) for row in rows]
        return cls(tokens=_flat(rows, torch.long), offsets=offsets_of(lengths), **columns)

    num_samples = Flat.num_rows  # former name, still supported for plug-in files

    @property
    def layout(self) -> Layout:
        """The layout of all rows as one block (B, T)."""
        return Layout.of(self.offsets)

    def row_of_token(self) -> Int[Tensor, " N"]:
        """Return the row of each token: offsets [0, 2, 5] → [0, 0, 1, 1, 1]."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return rows.repeat_interleave(self.lengths)

    def row_sums(self, column: Tensor) -> Tensor:
        """Sum a per-token column (N,) over each row: (B,)."""
        return column.new_zeros(self.num_rows).index_add(0, self.row_of_token(), column)

    def similar_rows(
        self, max_tokens: int, *, max_rows: int | None = None, padded: bool = True
    ) -> Iterator[Int[Tensor, " M"]]:
        """Yield the indices of all rows in parts of similar length, longest rows first.

        A part has at most `max_tokens` tokens and `max_rows` rows; a row that is too long gets a
        part of its own. With `padded`, every row counts as if it were as long as the longest row in
        its part.
        """
        shortest_first = self.lengths.argsort()
        while len(shortest_first):
            costs = self.lengths[shortest_first].flip(0)
            if padded:
                costs = costs[:1].expand(len(costs))
            fitting = int((costs.cumsum(0) <= max_tokens).sum())
            size = min(max(1, fitting), max_rows or len(costs))
            yield shortest_first[-size:]
            shortest_first = shortest_first[:-size]

    def parts(self, column: Tensor) -> list[Tensor]:
        """Split a per-token column (N,) into its rows."""
        return list(column.tensor_split(self.offsets[1:-1].cpu()))

    def split(self, partition: Sequence[Sequence[int]]) -> list[Self]:
        """Return one batch per list of rows."""
        return [self.select(rows) for rows in partition]


@dataclass(frozen=True, kw_only=True)
class TokenRows(Ragged):
    """Rows for supervised training."""

    loss_mask: Bool[Tensor, " N"] = per_token()  # True at the targets of the loss

    @classmethod
    def from_lists(
        cls,
        tokens: Sequence[Sequence[int]],
        loss_mask: Sequence[Sequence[bool]],
        **columns: Tensor | None,
    ) -> Self:
        """Return a batch with one row per pair of lists.

        Raises ValueError if the lists of a pair have different lengths.
        """
        for row, (row_tokens, row_mask) in enumerate(zip(tokens, loss_mask, strict=True)):
            if len(row_tokens) != len(row_mask):
                raise ValueError(
                    f"row {row} has {len(row_tokens)} tokens, but {len(row_mask)} loss mask entries"
                )
        return cls.of(tokens, loss_mask=_flat(loss_mask, torch.bool), **columns)


@dataclass(frozen=True, kw_only=True)
class Answers(TokenRows):
    """Prompts with answers. The answers' tokens are the targets."""

    reference: Float[Tensor, " B"] | None = per_row(default=None)  # Σ log π_ref of each answer
    desirable: Bool[Tensor, " B"] | None = per_row(default=None)  # label of each answer

    def answer_sums(self, logprobs: Float[Tensor, " N"]) -> Float[Tensor, " B"]:
        """Sum a per-token column over the targets of each row."""
        return self.row_sums(logprobs.masked_fill(~self.loss_mask, 0))


@dataclass(frozen=True, kw_only=True)
class Steps(Ragged):
    """Texts with labelled steps."""

    labels: Float[Tensor, " N"] = per_token()  # a step's label at its last token; NaN elsewhere


@dataclass(frozen=True, kw_only=True)
class Pairs(Ragged):
    """Pairs of texts: row 2i is the chosen text of pair i, and row 2i + 1 is the rejected text."""

    margins: Float[Tensor, " B"] = per_row()  # the pair's margin, stored for both of its rows


@dataclass(frozen=True, kw_only=True)
class Experience(Ragged):
    """A batch of episodes as it passes through annotation, credit assignment and the update.

    An episode has one row, or one row per conversation. A column is None until it is computed. A
    column is also None in a copy of the batch that `only` makes for workers that do not read it.
    """

    # Known after sampling.
    action_mask: Bool[Tensor, " N"] = per_token()  # True at tokens that the policy sampled
    rollout_logprobs: Float[Tensor, " N"] | None = per_token(default=None)  # log π, as sampled
    group_ids: Int[Tensor, " B"] = per_row()  # the same for all samples of a prompt
    truncated: Bool[Tensor, " B"] = per_row()  # True if the token budget ended the episode
    # The same number for all rows of an episode; None if each row is an episode.
    trajectory_ids: Int[Tensor, " B"] | None = per_row(default=None)

    # Known after scoring.
    rewards: Float[Tensor, " B"] = per_row()  # NaN until a reward model scores the episode
    # The part of the reward that belongs to each turn, at the turn's last token.
    turn_rewards: Float[Tensor, " N"] | None = per_token(default=None)

    # Computed by workers.
    old_logprobs: Float[Tensor, " N"] | None = per_token(default=None)  # log π_old
    ref_logprobs: Float[Tensor, " N"] | None = per_token(default=None)  # log π_ref
    teacher_logprobs: Float[Tensor, " N"] | None = per_token(default=None)
    values: Float[Tensor, " N"] | None = per_token(default=None)  # V of the state before token t

    # Computed by credit assignment.
    token_rewards: Float[Tensor, " N"] | None = per_token(default=None)  # r_t
    advantages: Float[Tensor, " N"] | None = per_token(default=None)  # Â_t
    returns: Float[Tensor, " N"] | None = per_token(default=None)  # Ĝ_t

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Return a batch of finished episodes, with the columns that all of them have.

        A sample's group is the index of its prompt. An episode with several conversations has one
        row per conversation, each with the episode's reward.
        """
        rows: list[Trajectory] = []
        trajectory_ids: list[int] = []
        group_ids: list[int] = []
        truncated: list[bool] = []
        for number, trajectory in enumerate(trajectories):
            for conversation in trajectory.conversations:
                rows.append(conversation)
                trajectory_ids.append(number)
                group_ids.append(trajectory.prompt.index)
                truncated.append(trajectory.truncated)
        columns: dict[str, Tensor] = {}
        if len(rows) > len(trajectories):
            columns["trajectory_ids"] = torch.tensor(trajectory_ids)
        for name in _shared_columns(rows):
            columns[name] = _flat([row.columns[name] for row in rows], torch.float32)
        return cls.of(
            [row.tokens for row in rows],
            action_mask=_flat([row.action_mask for row in rows], torch.bool),
            rollout_logprobs=_flat([row.rollout_logprobs for row in rows], torch.float32),
            group_ids=torch.tensor(group_ids, dtype=torch.long),
            truncated=torch.tensor(truncated, dtype=torch.bool),
            **reward_columns(trajectories),
            **columns,
        )

    @property
    def episode_of_row(self) -> Int[Tensor, " B"]:
        """The index of each row's episode within this batch."""
        if self.trajectory_ids is None:
            return torch.arange(self.num_rows, device=self.offsets.device)
        untyped = cast(Any, torch)
        return untyped.unique(self.trajectory_ids, return_inverse=True)[1]

    @property
    def last_rows(self) -> Int[Tensor, " E"]:
        """The last row of each of the batch's E episodes. Most episodes have only one row."""
        episodes = self.episode_of_row
        rows = torch.arange(self.num_rows, device=episodes.device)
        rows_per_episode = episodes.bincount()
        last = torch.zeros_like(rows_per_episode)
        return last.scatter_reduce(0, episodes, rows, "amax", include_self=False)

    def rows_of(self, episodes: Sequence[int]) -> Int[Tensor, " M"]:
        """Return the rows of the given episodes, which are numbered as in `episode_of_row`, in
        order.
        """
        wanted = torch.as_tensor(episodes, dtype=torch.long, device=self.offsets.device)
        return torch.isin(self.episode_of_row, wanted).nonzero().flatten()

    def targets(self) -> TokenRows:
        """Return the columns that workers need to score the sampled tokens."""
        return TokenRows(tokens=self.tokens, offsets=self.offsets, loss_mask=self.action_mask)

    def texts(self) -> Ragged:
        """Return the columns that reward models and critics need."""
        return Ragged(tokens=self.tokens, offsets=self.offsets)

    def only(self, *columns: str) -> Self:
        """Return the same batch with only the named optional columns."""
        optional = {column.name for column in fields(self) if column.default is None}
        return replace(self, **dict.fromkeys(optional.difference(columns)))

    @property
    def num_actions(self) -> Int[Tensor, " B"]:
        """The number of sampled tokens of each row."""
        return self.row_sums(self.action_mask.long())


def _flat(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    """Join rows into one column (N,).

    NumPy converts each row at once. A Python loop over the tokens of a large batch would take
    minutes.
    """
    parts = [torch.empty(0, dtype=dtype)]
    for row in rows:
        parts.append(torch.as_tensor(np.asarray(row), dtype=dtype))
    return torch.cat(parts)


def _shared_columns(rows: Sequence[Trajectory]) -> set[str]:
    """Return the names of the computed columns that all rows have."""
    if not rows:
        return set()
    return set(rows[0].columns).intersection(*(row.columns for row in rows))


def reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor | None]:
    """Return the columns `rewards` and `turn_rewards`.

    Each turn's reward is at the turn's last token. `turn_rewards` is None if no episode has any.
    """
    rewards: list[float] = []
    places: list[int] = []
    amounts: list[float] = []
    start = 0  # position of the row in the column
    for trajectory in trajectories:
        reward = math.nan if trajectory.reward is None else trajectory.reward
        for row in trajectory.conversations:
            rewards.append(reward)
            for position, amount in row.turn_rewards:
                places.append(start + position)
                amounts.append(amount)
            start += len(row.tokens)
    turn_rewards = None
    if places:
        column = np.zeros(start)
        np.add.at(column, places, amounts)  # unlike +=, adds up several rewards of the same token
        turn_rewards = torch.tensor(column, dtype=torch.float32)
    return {
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "turn_rewards": turn_rewards,
    }
