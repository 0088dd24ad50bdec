"""Batches of rows and their order: budgets, even partitions, epochs. Lengths are in tokens."""

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler


class Group(NamedTuple):
    """Rows of one part, and their tokens."""

    tokens: int
    rows: list[int]


class Solution(NamedTuple):
    """A partition of some rows. Solutions are ordered by how uneven they are."""

    unevenness: int  # tokens of the lightest part minus tokens of the heaviest part
    number: int  # of two equally uneven solutions, the older one comes first
    groups: list[Group]  # the non-empty parts, heaviest first


def balanced_partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return row numbers in `parts` non-empty groups of nearly equal token counts.

    The largest-differencing method joins the two least even partial solutions until one is left:
    the heavy groups of one solution with the light groups of the other. Raises ValueError for fewer
    rows than groups. Karmarkar and Karp 1982, UCB/CSD-82-113.
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(f"{len(lengths)} rows cannot be dealt to {parts} non-empty groups")
    solutions: list[Solution] = []
    for row, length in enumerate(lengths):
        solutions.append(Solution(-length, row, [Group(length, [row])]))
    heapq.heapify(solutions)
    number = len(solutions)
    while len(solutions) > 1:
        heavy = heapq.heappop(solutions).groups
        light = heapq.heappop(solutions).groups
        # Join the heaviest groups of one solution with empty groups of the other.
        light_empty = max(parts - len(light), 0)
        heavy_empty = len(light) - len(heavy[light_empty:])
        joined = heavy[:light_empty] + light[:heavy_empty]
        lightest_first = reversed(light[heavy_empty:])
        for a, b in zip(heavy[light_empty:], lightest_first, strict=True):
            joined.append(Group(a.tokens + b.tokens, a.rows + b.rows))
        joined.sort(key=attrgetter("tokens"), reverse=True)
        lightest = joined[-1].tokens if len(joined) == parts else 0
        heapq.heappush(solutions, Solution(lightest - joined[0].tokens, number, joined))
        number += 1
    return sorted(sorted(group.rows) for group in solutions[0].groups)


def batches_of_rows(rows: Sequence[int], size: int) -> list[list[int]]:
    """Return batches of consecutive rows, at most `size` in each, as even as possible."""
    count = math.ceil(len(rows) / size)
    batches: list[list[int]] = []
    start = 0
    for batch in range(1, count + 1):
        end = round(batch * len(rows) / count)
        batches.append(list(rows[start:end]))
        start = end
    return batches


def batches_of_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return row numbers in batches with nearly equal token counts, at most `max_tokens` each.

    A longer row is alone in its batch.
    """
    fitting: list[int] = []
    fitting_lengths: list[int] = []
    batches: list[list[int]] = []
    for row, length in enumerate(lengths):
        if length <= max_tokens:
            fitting.append(row)
            fitting_lengths.append(length)
        else:
            batches.append([row])
    count = max(math.ceil(sum(fitting_lengths) / max_tokens), 1)
    while fitting:
        parts = balanced_partition(fitting_lengths, count)
        most_tokens = 0
        for part in parts:
            most_tokens = max(most_tokens, sum(fitting_lengths[place] for place in part))
        if most_tokens <= max_tokens:
            for part in parts:
                batches.append([fitting[place] for place in part])
            return sorted(batches)
        count += 1
    return batches


class ResumableSampler(Sampler[int]):
    """The order of rows in each epoch for one data-parallel rank, resumable at any row.

    Epoch e visits a permutation that depends only on `seed + e`. Rank r takes the entries r, r +
    dp_size, … With `drop_last`, an epoch is cut to whole batches of `batch_size` rows over all
    ranks, so that every rank gets the same number of rows. Without `drop_last`, every row is
    visited once, and the row counts of two ranks may differ by one. Iterating yields the rest of
    the epoch.

    Example: 7 rows for two ranks without shuffling. Rank 0 gets 0, 2, 4 (without `drop_last` also
    6), rank 1 gets 1, 3, 5.

    `consumed`: rows that all ranks together have used since training began.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int,
        shuffle: bool = True,
        dp_rank: int = 0,
        dp_size: int = 1,
        batch_size: int = 1,
        consumed: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.epoch_rows = num_rows
        if drop_last:
            self.epoch_rows -= num_rows % math.lcm(batch_size, dp_size)
        self.epoch, used = divmod(consumed, max(self.epoch_rows, 1))
        self.position = used // dp_size  # rows of this epoch that this rank has taken

    def __len__(self) -> int:
        """Return the number of rows of a whole epoch for this rank."""
        return len(range(self.dp_rank, self.epoch_rows, self.dp_size))

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] | npt.NDArray[np.int64] = range(self.num_rows)
        if self.shuffle:
            order = permutation(self.num_rows, self.seed + self.epoch)
        first = self.dp_rank + self.position * self.dp_size
        for place in range(first, self.epoch_rows, self.dp_size):
            yield int(order[place])


# The orders of training and pretraining rows are both needed at every step or held prompt.
@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the order of the rows in the epoch with this seed; 8 bytes per row."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).numpy()
