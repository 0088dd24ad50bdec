"""The rows that each rank trains on in each optimizer step.

They are decided once for all ranks, before anything is sent. The set of rows of an optimizer step
does not depend on the number of ranks; only their assignment to ranks does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from openrlhf.data.batching import balanced_partition


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """One rank's rows of an update. `steps` has the places in `rows` of each optimizer step, or
    none.
    """

    rows: list[int]
    steps: list[list[int]]


def plan_update(
    lengths: Sequence[int],
    *,
    ranks: int,
    batch_size: int,
    epochs: int,
    seed: int,
    episodes: Sequence[int] | None = None,
) -> list[RankUpdate]:
    """Cut rows of `lengths` tokens into optimizer steps of `batch_size` episodes, balanced over the
    ranks.

    `episodes`: the number of each row's episode; by default, every row is an episode. The rows of
    an episode are in one step. Each epoch has its own order. The remaining rows make a last,
    smaller step, because they were generated at full cost. The plan depends only on the arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    per_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    every_episode = _rows_by_episode(range(len(lengths)) if episodes is None else episodes)
    for _ in range(epochs):
        order = torch.randperm(len(every_episode), generator=generator).tolist()
        for first in range(0, len(order), batch_size):
            chosen = [every_episode[place] for place in order[first : first + batch_size]]
            for rank, rows in enumerate(share(lengths, list(chain.from_iterable(chosen)), ranks)):
                per_rank[rank].append(rows)
    return [_with_local_rows(steps) for steps in per_rank]


def share(lengths: Sequence[int], rows: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide `rows` over the ranks so that their token counts are close.

    A rank may get none if there are few. Each rank's rows are in order: samples of a prompt are
    neighbours, and a packed micro-batch computes their prompt once.
    """
    if len(rows) < ranks:
        alone = [[row] for row in rows]
        return alone + [[] for _ in range(ranks - len(rows))]
    parts: list[list[int]] = []
    for places in balanced_partition([lengths[row] for row in rows], ranks):
        parts.append(sorted(rows[place] for place in places))
    return parts


def _rows_by_episode(episodes: Sequence[int]) -> list[list[int]]:
    """Return the rows of every episode, given the episode of every row."""
    rows: dict[int, list[int]] = {}
    for row, episode in enumerate(episodes):
        rows.setdefault(episode, []).append(row)
    return list(rows.values())


def _with_local_rows(steps: list[list[int]]) -> RankUpdate:
    """Collect the rows of a rank once, and let its steps say their places among these.

    A rank without any row gets the first, because some forwards are collective. No step trains on
    it.
    """
    rows = sorted(set(chain.from_iterable(steps)))
    place = {row: number for number, row in enumerate(rows)}
    local: list[list[int]] = []
    for step in steps:
        local.append([place[row] for row in step])
    return RankUpdate(rows=rows or [0], steps=local)
