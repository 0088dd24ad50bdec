"""Reduces logged metrics over micro-batches and ranks.

A worker reports a `dict[str, Metric]`. `merge_all` merges these dicts, whose keys may differ, and
`values` returns the floats to log. `glossary.toml` defines each name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self


class Metric(Protocol):
    """A number that can be merged with its counterparts from other micro-batches and ranks."""

    @property
    def value(self) -> float:
        """The number to log."""
        ...

    def merge(self, other: Self) -> Self:
        """Return the metric over everything covered by either metric."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean. Merging parts of different sizes gives the mean over all their values."""

    sum: float
    count: float

    def merge(self, other: Self) -> Self:
        """Return the mean over everything counted by either metric."""
        return replace(self, sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def value(self) -> float:
        """The mean sum / count; NaN if nothing was counted."""
        if not self.count:
            return math.nan
        return self.sum / self.count


@dataclass(frozen=True, slots=True)
class Deviation:
    """An unbiased standard deviation.

    Squared distances from the mean are accumulated, so that rounding errors cannot hide a small
    deviation.

    Chan, Golub and LeVeque 1979, STAN-CS-79-773, eq. 1.5
    """

    count: float
    mean: float
    squares: float  # sum of the squared distances from the mean

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Compute the deviation of a sequence of numbers."""
        mean = math.fsum(numbers) / len(numbers)
        squares = math.fsum((number - mean) ** 2 for number in numbers)
        return cls(len(numbers), mean, squares)

    def merge(self, other: Self) -> Self:
        """Return the deviation over the numbers of both metrics."""
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * other.count / count
        squares = self.squares + other.squares
        squares += difference**2 * self.count * other.count / count
        return replace(self, count=count, mean=mean, squares=squares)

    @property
    def value(self) -> float:
        """The standard deviation √(squares / (count − 1)); 0 for a single number."""
        return math.sqrt(self.squares / max(self.count - 1, 1))


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value, or NaN if any part is NaN, because a large value must not hide a NaN."""

    value: float

    def merge(self, other: Self) -> Self:
        """Return the metric with the larger value, or with the value NaN if either is NaN."""
        if math.isnan(self.value) or self.value >= other.value:
            return self
        return other


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value, e.g. a learning rate, a gradient norm, a duration or a running count."""

    value: float

    def merge(self, other: Self) -> Self:
        """Return `other`, which is the newer metric."""
        return other


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of micro-batches and ranks, in order.

    A metric that is missing from some parts is reduced over the parts that contain it. A metric
    must have the same reduction in all parts.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged:
                merged[name] = merged[name].merge(metric)
            else:
                merged[name] = metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers to log. A mean over no values is omitted."""
    logged: dict[str, float] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mean) and metric.count == 0:
            continue
        logged[name] = float(metric.value)
    return logged
