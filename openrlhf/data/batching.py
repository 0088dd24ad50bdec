"""Orders and batches rows: size limits, even partitions and epochs. Lengths are in tokens."""

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
    """The rows of one part and their total cost."""

    cost: int
    rows: list[int]


class Solution(NamedTuple):
    """A partition of a subset of the rows. Solutions are compared by unevenness."""

    unevenness: int  # cost of the lightest part minus cost of the heaviest part
    number: int  # breaks ties: the older of two equally uneven solutions comes first
    groups: list[Group]  # the non-empty parts, heaviest first


def row_costs(lengths: Sequence[int], attention_length: int | None) -> list[int]:
    """Return the relative compute of each row: n · (A + n) for n tokens, or n if A is None.

    A is the length at which attention costs as much as the matrix products with weights
    (`models.cost`).
    """
    if attention_length is None:
        return list(lengths)
    tokens = np.array(lengths, dtype=np.int64)
    return (tokens * (attention_length + tokens)).tolist()


def balanced_partition(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide row indices into `parts` non-empty groups of nearly equal costs.

    The costs of any two groups differ by at most the largest cost of a row.

    The largest-differencing method repeatedly merges the two least even partial solutions, pairing
    the heavy groups of one with the light groups of the other, until one solution remains. Raises
    ValueError if there are fewer rows than groups. Karmarkar and Karp 1982, UCB/CSD-82-113.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} rows cannot be split into {parts} non-empty groups")
    solutions: list[Solution] = []
    for row, cost in enumerate(costs):
        solutions.append(Solution(-cost, row, [Group(cost, [row])]))
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
            joined.append(Group(a.cost + b.cost, a.rows + b.rows))
        joined.sort(key=attrgetter("cost"), reverse=True)
        lightest = joined[-1].cost if len(joined) == parts else 0
        heapq.heappush(solutions, Solution(lightest - joined[0].cost, number, joined))
        number += 1
    return sorted(sorted(group.rows) for group in solutions[0].groups)


def batches_of_rows(rows: Sequence[int], size: int, *, at_least: int = 1) -> list[list[int]]:
    """Split the rows into consecutive batches of at most `size` rows, as evenly as possible.

    Returns at least `at_least` batches if there are enough rows.
    """
    count = max(math.ceil(len(rows) / size), min(at_least, len(rows)))
    edges = [0, *(round(batch * len(rows) / count) for batch in range(1, count + 1))]
    return [list(rows[start:end]) for start, end in pairwise(edges)]


def batches_of_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    attention_length: int | None = None,
    at_least: int = 1,
) -> list[list[int]]:
    """Group row indices into batches of nearly equal costs, with at most `max_tokens` tokens each.

    A row longer than `max_tokens` gets its own batch. Costs are computed by `row_costs`. Returns
    the smallest number of batches for which a partition is found. If `at_least` is larger, returns
    that many batches (as long as there are enough rows), so that all ranks can run the same number
    of batches.
    """
    fitting: list[int] = []
    batches: list[list[int]] = []
    for row, length in enumerate(lengths):
        if length <= max_tokens:
            fitting.append(row)
        else:
            batches.append([row])
    short = [lengths[row] for row in fitting]
    costs = row_costs(short, attention_length)
    parts: list[list[int]] | None = [] if not fitting else None
    count = max(math.ceil(sum(short) / max_tokens), 1)
    while parts is None:
        parts = _partition_within(short, costs, count, max_tokens)
        count += 1
    wanted = min(at_least - len(batches), len(fitting))
    if wanted > len(parts):
        more = _partition_within(short, costs, wanted, max_tokens)
        parts = more or split_further(parts, wanted)
    for part in parts:
        batches.append([fitting[place] for place in part])
    return sorted(batches)


def _partition_within(
    lengths: Sequence[int], costs: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Return `count` groups of at most `max_tokens`, or None if no partition is found.

    Groups of similar cost may exceed the limit, because many short rows cost as much as one long
    row; groups with similar numbers of tokens are then tried instead.
    """
    for balanced in (costs, lengths):
        parts = balanced_partition(balanced, count)
        totals = [sum(map(lengths.__getitem__, part)) for part in parts]
        if max(totals) <= max_tokens:
            return parts
    return None


def batches_of_padded_tokens(
    lengths: Sequence[int], max_tokens: int, *, at_least: int = 1
) -> list[list[int]]:
    """Group row indices by length, with at most `max_tokens` tokens per batch, including padding.

    The longest rows come first, and a row longer than `max_tokens` gets its own batch. Returns at
    least `at_least` batches if there are enough rows.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    for row in longest_first:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return split_further(batches, min(at_least, len(lengths)))


def split_further(batches: Sequence[list[int]], count: int) -> list[list[int]]:
    """Halve the batch with the most rows until there are `count` batches (needs `count` rows)."""
    batches = list(batches)
    while len(batches) < count:
        largest = max(batches, key=len)
        batches.remove(largest)
        half = len(largest) // 2
        batches += [largest[:half], largest[half:]]
    return batches


class ResumableSampler(Sampler[int]):
    """The order of rows in each epoch for one data-parallel rank, resumable at any row.

    Epoch e visits a permutation that depends only on `seed + e`. Rank r takes entries r, r +
    dp_size, r + 2 · dp_size and so on. With `drop_last`, the epoch is truncated to full batches of
    `batch_size` rows (counted over all ranks), which gives every rank the same number of rows.
    Without `drop_last`, every row is visited once, and ranks may differ by one row. Iteration
    yields the rest of the current epoch.

    Example: with 7 rows and two ranks, rank 0 gets entries 0, 2, 4 (and 6 without `drop_last`), and
    rank 1 gets entries 1, 3, 5.

    `consumed` is the number of rows that all ranks together have used since training began.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        batch_size: int = 1,
        consumed: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.num_rows = num_rows
        self.seed = seed
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
        order = permutation(self.num_rows, self.seed + self.epoch)
        first = self.dp_rank + self.position * self.dp_size
        for place in range(first, self.epoch_rows, self.dp_size):
            yield int(order[place])


# The cache has two entries: every step uses the orders of the training and pretraining rows.
@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the row order of the epoch with this seed. The order takes 8 bytes per row."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).numpy()
