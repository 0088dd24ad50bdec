"""Assigns rows to data slices and optimizer steps.

The assignment is computed for all slices before any rows are sent. The number of slices affects
only which slice gets a row, not which rows belong to an optimizer step.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from openrlhf.data.batching import balanced_partition


@dataclass(frozen=True, kw_only=True)
class SliceUpdate:
    """The rows of one data slice in an update.

    `steps[k]` are the positions in `rows` that optimizer step k trains on.
    """

    rows: list[int]
    steps: list[list[int]]


def plan_update(
    costs: Sequence[int],
    *,
    slices: int,
    batch_size: int,
    epochs: int,
    seed: int,
    episodes: Sequence[int] | None = None,
) -> list[SliceUpdate]:
    """Split rows into optimizer steps of `batch_size` episodes, balanced over the data slices.

    `costs` contains the relative compute cost of each row (`row_costs`). `episodes` contains the
    index of each row's episode; by default, every row is a separate episode. All rows of an episode
    are in the same step. Each epoch is reshuffled. Rows left over after the last full batch form a
    smaller step, because they were generated at full cost. The plan depends only on the arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    per_slice: list[list[list[int]]] = [[] for _ in range(slices)]
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, episode in enumerate(episodes or range(len(costs))):
        rows_of[episode].append(row)
    every_episode = list(rows_of.values())
    for _ in range(epochs):
        order = torch.randperm(len(every_episode), generator=generator).tolist()
        for first in range(0, len(order), batch_size):
            chosen = [every_episode[place] for place in order[first : first + batch_size]]
            for number, rows in enumerate(
                distribute(costs, list(chain.from_iterable(chosen)), slices)
            ):
                per_slice[number].append(rows)
    return [_with_local_rows(steps) for steps in per_slice]


def distribute(costs: Sequence[int], rows: Sequence[int], slices: int) -> list[list[int]]:
    """Distribute `rows` over the slices so that the slices' total costs are similar.

    If there are fewer rows than slices, some slices get no rows. Each slice's rows stay in order,
    so that samples of the same prompt are adjacent and a packed micro-batch computes their prompt
    once.
    """
    if len(rows) < slices:
        alone = [[row] for row in rows]
        return alone + [[] for _ in range(slices - len(rows))]
    parts: list[list[int]] = []
    for places in balanced_partition([costs[row] for row in rows], slices):
        parts.append(sorted(rows[place] for place in places))
    return parts


def _with_local_rows(steps: list[list[int]]) -> SliceUpdate:
    """Return a slice's distinct rows, and its steps as indices into these rows.

    A slice without rows gets the first row, because some forward passes are collective. No
    optimizer step trains on this row.
    """
    rows = sorted(set(chain.from_iterable(steps)))
    place = {row: number for number, row in enumerate(rows)}
    local: list[list[int]] = []
    for step in steps:
        local.append([place[row] for row in step])
    return SliceUpdate(rows=rows or [0], steps=local)
