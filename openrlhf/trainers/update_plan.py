"""The rows that each rank trains on in each optimizer step, decided once for all ranks before
anything is sent.

The set of rows of an optimizer step does not depend on the number of ranks; only their assignment
to ranks does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from openrlhf.data.batching import balanced_partition


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """One rank's rows of an update. `steps` has the indices into `rows` of each optimizer step,
    perhaps none.
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
    rows_of: dict[int, list[int]] = {}  # by episode
    for row, episode in enumerate(range(len(lengths)) if episodes is None else episodes):
        rows_of.setdefault(episode, []).append(row)
    every_episode = list(rows_of.values())
    for _ in range(epochs):
        order = torch.randperm(len(every_episode), generator=generator).tolist()
        for first in range(0, len(order), batch_size):
            chosen = [every_episode[place] for place in order[first : first + batch_size]]
            for rank, rows in enumerate(share(lengths, list(chain.from_iterable(chosen)), ranks)):
                per_rank[rank].append(rows)
    return [_with_local_rows(steps) for steps in per_rank]


def share(lengths: Sequence[int], rows: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide `rows` over the ranks so that their token counts are close. A rank may get none if
    there are few.

    Each rank's rows are in order: samples of a prompt are neighbours, and a packed micro-batch
    computes their prompt once.
    """
    if len(rows) < ranks:
        return [[row] for row in rows] + [[] for _ in range(ranks - len(rows))]
    parts = balanced_partition([lengths[row] for row in rows], ranks)
    return [sorted(rows[i] for i in part) for part in parts]


def _with_local_rows(steps: list[list[int]]) -> RankUpdate:
    """A rank without any row gets the first, because some forwards are collective. No step trains
    on it.
    """
    rows = sorted({row for step in steps for row in step})
    place = {row: i for i, row in enumerate(rows)}
    return RankUpdate(rows=rows or [0], steps=[[place[row] for row in step] for step in steps])
