"""Batching and ordering of rows: size limits, even partitions and epochs. Lengths are in tokens."""

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler


class Group(NamedTuple):
    """The rows of one part and their total token count."""

    tokens: int
    rows: list[int]


class Solution(NamedTuple):
    """A partition of a subset of the rows. Solutions compare by unevenness."""

    unevenness: int  # tokens of the lightest part minus tokens of the heaviest part
    number: int  # breaks ties: the older of two equally uneven solutions comes first
    groups: list[Group]  # the non-empty parts, heaviest first


def balanced_partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide row numbers into `parts` non-empty groups of nearly equal token counts.

    The largest-differencing method repeatedly merges the two least even partial solutions, pairing
    the heavy groups of one with the light groups of the other, until one solution remains. Raises
    ValueError if there are fewer rows than groups. Karmarkar and Karp 1982, UCB/CSD-82-113.
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(f"{len(lengths)} rows cannot be split into {parts} non-empty groups")
    solutions: list[Solution] = []
    for row, length in enumerate(lengths):
        solutions.append(Solution(-length, row, [Group(length, [row])]))
    heapq.heapify(solutions)
    number = len(solutions)
    while len(solutions) > 1:
        heavy = heapq.heappop(solutions).groups
        light = heapq.heappop(solutions).groups
        # Merge the heaviest groups of one solution with empty groups of the other.
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
    """Split the rows into consecutive batches of at most `size` rows, as evenly as possible."""
    count = math.ceil(len(rows) / size)
    edges = [0, *(round(batch * len(rows) / count) for batch in range(1, count + 1))]
    return [list(rows[start:end]) for start, end in pairwise(edges)]


def batches_of_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row numbers into batches of nearly equal token counts, at most `max_tokens` each.

    A row longer than `max_tokens` gets its own batch.
    """
    fitting: list[int] = []
    batches: list[list[int]] = []
    for row, length in enumerate(lengths):
        if length <= max_tokens:
            fitting.append(row)
        else:
            batches.append([row])
    short = [lengths[row] for row in fitting]
    count = max(math.ceil(sum(short) / max_tokens), 1)
    parts: list[list[int]] = []
    while fitting:
        parts = balanced_partition(short, count)
        if max(sum(map(short.__getitem__, part)) for part in parts) <= max_tokens:
            break
        count += 1
    for part in parts:
        batches.append([fitting[place] for place in part])
    return sorted(batches)


class ResumableSampler(Sampler[int]):
    """The order of rows in each epoch for one data-parallel rank, resumable at any row.

    Epoch e visits a permutation that depends only on `seed + e`. Rank r takes entries r, r +
    dp_size, r + 2 · dp_size and so on. With `drop_last`, the epoch is truncated to full batches of
    `batch_size` rows (counted over all ranks), which gives every rank the same number of rows.
    Without `drop_last`, every row is visited once, and ranks may differ by one row. Iteration
    yields the rest of the current epoch.

    Example: with 7 rows, two ranks and no shuffling, rank 0 gets rows 0, 2, 4 (and 6 without
    `drop_last`), and rank 1 gets rows 1, 3, 5.

    `consumed` is the number of rows that all ranks together have used since training began.
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
        self.position = used // dp_size  # number of rows this rank has taken in this epoch

    def __len__(self) -> int:
        """Return the number of rows this rank gets in a full epoch."""
        return len(range(self.dp_rank, self.epoch_rows, self.dp_size))

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] | npt.NDArray[np.int64] = range(self.num_rows)
        if self.shuffle:
            order = permutation(self.num_rows, self.seed + self.epoch)
        first = self.dp_rank + self.position * self.dp_size
        for place in range(first, self.epoch_rows, self.dp_size):
            yield int(order[place])


# The cache has two entries, because every step uses two orders: that of the training rows and that
# of the pretraining rows.
@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the row order of the epoch with this seed. The order takes 8 bytes per row."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).numpy()
