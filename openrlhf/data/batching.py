"""Which rows go together and in which order: budgets, even partitions, epochs. Lengths are in
tokens.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler


def balanced_partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers in `parts` non-empty groups of nearly equal token counts.

    The largest-differencing method joins the two least even partial solutions until one is left:
    the heavy groups of one solution with the light groups of the other. Raises ValueError for fewer
    rows than groups. Karmarkar and Karp 1982, UCB/CSD-82-113.
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(f"{len(lengths)} rows cannot be dealt to {parts} non-empty groups")
    # A solution: (− heaviest + lightest, number, its non-empty groups as (tokens, rows), heaviest
    # first).
    number = itertools.count()  # ties: the older solution first
    solutions = [(-length, next(number), [(length, [row])]) for row, length in enumerate(lengths)]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, _, heavy = heapq.heappop(solutions)
        _, _, light = heapq.heappop(solutions)
        apart = max(
            parts - len(light), 0
        )  # these many of the heaviest meet an empty group of the other
        joined, rest = heavy[:apart], heavy[apart:]
        unmet = len(light) - len(rest)  # heavy's empty groups meet the heaviest of the other
        joined += light[:unmet]
        joined += [
            (a + b, x + y) for (a, x), (b, y) in zip(rest, reversed(light[unmet:]), strict=True)
        ]
        joined.sort(key=itemgetter(0), reverse=True)
        lightest = joined[-1][0] if len(joined) == parts else 0
        heapq.heappush(solutions, (lightest - joined[0][0], next(number), joined))
    return sorted(sorted(rows) for _, rows in solutions[0][2])


def batches_of_rows(rows: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive rows, at most `size` in each batch, as even as possible."""
    count = math.ceil(len(rows) / size)
    edges = [round(part * len(rows) / count) for part in range(count + 1)] if count else []
    return [list(rows[start:end]) for start, end in itertools.pairwise(edges)]


def batches_of_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers of batches with nearly equal token counts, at most `max_tokens` each; a longer
    row is alone in its batch.
    """
    fitting = [row for row, length in enumerate(lengths) if length <= max_tokens]
    groups = [[row] for row, length in enumerate(lengths) if length > max_tokens]
    count = math.ceil(sum(lengths[row] for row in fitting) / max_tokens)
    while fitting:
        parts = balanced_partition([lengths[row] for row in fitting], max(count, 1))
        even = [[fitting[place] for place in part] for part in parts]
        if max(sum(lengths[row] for row in rows) for rows in even) <= max_tokens:
            return sorted([*groups, *even])
        count += 1
    return groups


class ResumableSampler(Sampler[int]):
    """The order of rows in every epoch, dealt to data-parallel ranks; it can start at any row.

    Epoch e visits a permutation that depends on `seed + e` only. Rank r takes the entries r, r +
    dp_size, … With `drop_last` an epoch is cut to whole batches of `batch_size` rows over all
    ranks, so that every rank gets the same number of rows. Without `drop_last` every row is visited
    once, and the numbers of rows of two ranks may differ by one. Iterating gives the rest of the
    epoch.

    Example, 7 rows for two ranks without shuffling: rank 0 gets 0, 2, 4 (without `drop_last` also
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
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.epoch_rows = (
            num_rows - num_rows % math.lcm(batch_size, dp_size) if drop_last else num_rows
        )
        self.epoch, used = divmod(consumed, max(self.epoch_rows, 1))
        self.position = used // dp_size  # rows of this epoch that this rank has taken

    def __len__(self) -> int:
        """Number of rows of a whole epoch for this rank."""
        return len(range(self.dp_rank, self.epoch_rows, self.dp_size))

    def __iter__(self) -> Iterator[int]:
        order = (
            permutation(self.num_rows, self.seed + self.epoch)
            if self.shuffle
            else range(self.num_rows)
        )
        for row in range(
            self.dp_rank + self.position * self.dp_size, self.epoch_rows, self.dp_size
        ):
            yield int(order[row])


@lru_cache(
    maxsize=2
)  # of training and pretraining rows, each asked for again at every step or held prompt
def permutation(num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """The order of the rows in the epoch with this seed; 8 bytes per row."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).numpy()
