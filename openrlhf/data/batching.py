"""Which rows go together, and in which order: budgets, even partitions, epochs. Lengths: tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from torch.utils.data import Sampler


def pack_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of row numbers whose lengths sum to at most `budget` tokens; every row is in one bin.

    A row that is longer than the budget has a bin of its own. Best fit, longest rows first: at most about 11/9 of the
    fewest possible bins. Johnson et al. 1974, doi:10.1137/0203025
    """
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, bin number), ascending
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tightest = bisect_left(space, (lengths[row], 0))
        if tightest == len(space):
            insort(space, (max(budget - lengths[row], 0), len(bins)))
            bins.append([row])
        else:
            free, bin_number = space.pop(tightest)
            insort(space, (free - lengths[row], bin_number))
            bins[bin_number].append(row)
    return [sorted(rows) for rows in bins]


def balanced_partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers in `parts` non-empty groups of nearly equal token counts.

    The largest-differencing method: of all partial solutions, the two least even are joined, the
    heavy groups of one with the light groups of the other. Where greedy, longest row first to the
    lightest group, is more even, its answer is taken. Group sums differ by at most the longest row.
    Raises ValueError for fewer rows than groups. Karmarkar and Karp 1982, UCB/CSD-82-113.
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(f"{len(lengths)} rows cannot be dealt to {parts} non-empty groups")
    candidates = _largest_differencing(lengths, parts), _longest_first(lengths, parts)
    best = min(candidates, key=lambda groups: max(tokens for tokens, _ in groups))
    return sorted(sorted(rows) for _, rows in best)


_Groups = list[tuple[int, list[int]]]  # (tokens, rows) of each group


def _largest_differencing(lengths: Sequence[int], parts: int) -> _Groups:
    """Partial solutions list their non-empty groups only, heaviest first."""
    number = itertools.count()  # ties: the older solution first
    solutions = [(-length, next(number), [(length, [row])]) for row, length in enumerate(lengths)]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, _, heavy = heapq.heappop(solutions)
        _, _, light = heapq.heappop(solutions)
        apart = max(parts - len(light), 0)  # these many of the heaviest meet an empty group of the other
        joined, rest = heavy[:apart], heavy[apart:]
        unmet = len(light) - len(rest)  # heavy's empty groups meet the heaviest of the other
        joined += light[:unmet]
        joined += [(a + b, x + y) for (a, x), (b, y) in zip(rest, reversed(light[unmet:]), strict=True)]
        joined.sort(key=itemgetter(0), reverse=True)
        lightest = joined[-1][0] if len(joined) == parts else 0
        heapq.heappush(solutions, (lightest - joined[0][0], next(number), joined))
    return solutions[0][2]


def _longest_first(lengths: Sequence[int], parts: int) -> _Groups:
    """Each row, longest first, to the group that is lightest so far."""
    groups: list[tuple[int, int, list[int]]] = [(0, 0, []) for _ in range(parts)]  # tokens, rows, row numbers
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, count, rows = groups[0]
        heapq.heapreplace(groups, (tokens + lengths[row], count + 1, [*rows, row]))
    return [(tokens, rows) for tokens, _, rows in groups]


def micro_batches(lengths: Sequence[int], *, size: int | None, max_tokens: int | None) -> list[list[int]]:
    """Row numbers of each micro-batch. Every row is in one micro-batch, and no micro-batch is empty.

    With `size`, consecutive rows, at most `size` in each, as even as possible. With `max_tokens`, groups of nearly equal
    token counts, at most `max_tokens` each; a longer row is a micro-batch of its own. Raises ValueError unless exactly one
    limit is given.
    """
    if (size is None) == (max_tokens is None):
        raise ValueError(f"give either size or max_tokens, not size={size} and max_tokens={max_tokens}")
    if not lengths:
        return []
    if max_tokens is None:
        assert size is not None
        count = math.ceil(len(lengths) / size)
        edges = [round(part * len(lengths) / count) for part in range(count + 1)]
        return [list(range(start, end)) for start, end in itertools.pairwise(edges)]
    packed = pack_by_budget(lengths, max_tokens)
    even = balanced_partition(lengths, len(packed))
    return even if max(sum(lengths[row] for row in rows) for rows in even) <= max_tokens else packed


class ResumableSampler(Sampler[int]):
    """The order of rows in every epoch, dealt to data-parallel ranks; can stop and go on anywhere.

    Epoch e visits a permutation that depends on `seed + e` only; rank r takes its entries r,
    r + dp_size, … With `drop_last` an epoch is cut to whole batches of `batch_size` rows over all
    ranks, so every rank gets equally many; without it nothing is left out or repeated, and ranks
    may differ by one row. Iterating gives what is left of the epoch.

    Example, 7 rows for two ranks without shuffling: rank 0 gets 0, 2, 4 (without `drop_last` also
    6), rank 1 gets 1, 3, 5.

    `consumed`: rows that all ranks together have used since training began.
    Raises ValueError where the rows do not fill one batch.
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
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"rank {dp_rank} is not one of {dp_size} data-parallel ranks")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.epoch_rows = num_rows - num_rows % math.lcm(batch_size, dp_size) if drop_last else num_rows
        if drop_last and not self.epoch_rows:
            raise ValueError(
                f"{num_rows} rows do not fill one batch of {batch_size} over {dp_size} ranks. "
                "Lower --train.batch_size, or give more data."
            )
        self.epoch, used = divmod(consumed, max(self.epoch_rows, 1))
        self.position = used // dp_size  # rows of this epoch that this rank has taken

    def __len__(self) -> int:
        """Rows of a whole epoch for this rank."""
        return len(range(self.dp_rank, self.epoch_rows, self.dp_size))

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for row in range(self.dp_rank + self.position * self.dp_size, self.epoch_rows, self.dp_size):
            yield order[row]

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_rows, generator=generator).tolist()
