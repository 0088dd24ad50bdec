"""How logged numbers reduce over micro-batches and ranks.

A worker reports `dict[str, Metric]`; `merge_all` joins the reports, which may have different keys;
`values` gives the floats that are logged. What each name means: `glossary.toml`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self


class Metric(Protocol):
    """A number that knows how to join with the same number of another micro-batch or rank."""

    @property
    def value(self) -> float: ...  # the number that is logged

    def merge(self, other: Self) -> Self: ...  # both as one


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that knows its weight, so that merging parts of different sizes gives the mean of the
    whole.
    """

    sum: float
    count: float

    def merge(self, other: Self) -> Self:
        """The mean of everything that either has counted."""
        return replace(self, sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def value(self) -> float:
        """sum / count; NaN if nothing was counted."""
        return self.sum / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Deviation:
    """An unbiased standard deviation. Distances are from the mean, so that rounding cannot replace
    a small one.

    Chan, Golub and LeVeque 1979, STAN-CS-79-773, eq. 1.5
    """

    count: float
    mean: float
    squares: float  # sum of the squared distances from the mean

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """The deviation of some numbers."""
        mean = math.fsum(numbers) / len(numbers)
        return cls(len(numbers), mean, math.fsum((number - mean) ** 2 for number in numbers))

    def merge(self, other: Self) -> Self:
        """The deviation of all the numbers."""
        count, apart = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return replace(
            self, count=count, mean=self.mean + apart * other.count / count, squares=squares
        )

    @property
    def value(self) -> float:
        """√(squares / (count − 1)); 0 for a single number."""
        return math.sqrt(self.squares / max(self.count - 1, 1))


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen. If one part is NaN, the result is NaN, so that a large value cannot
    hide it.
    """

    value: float

    def merge(self, other: Self) -> Self:
        """The larger one, or the one that is NaN."""
        return self if math.isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value: for a learning rate, a gradient norm, a duration, or a count that one
    process keeps.
    """

    value: float

    def merge(self, other: Self) -> Self:
        """The other one, which is newer."""
        return other


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Join the metrics of micro-batches and ranks, in their order.

    A name that some parts lack is reduced over the parts that have it. All parts reduce a name in
    the same way.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, new in part.items():
            old = merged.get(name)
            merged[name] = new if old is None else old.merge(new)
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The plain numbers to log. A mean over nothing is left out, because it has no value."""
    return {
        name: float(metric.value)
        for name, metric in metrics.items()
        if not (isinstance(metric, Mean) and metric.count == 0)
    }
