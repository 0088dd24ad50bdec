"""Line charts for the report: pure functions from the numbers of a run to places in a drawing.

The page's template turns a `Chart` into SVG, and its script shows the values under the pointer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

Series = Sequence[tuple[float, float]]  # (step, value), in the order of the steps

WIDTH, HEIGHT = 360, 168  # of the whole drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 42, 352, 8, 148  # edges of the part that has the curves
MAX_POINTS = 240  # of a drawn line
FEW = 24  # so many points or fewer are marked by dots


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve. `path` is SVG; a noisy curve is pale, and its moving mean `trend` is drawn over
    it.
    """

    path: str
    trend: str
    dots: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one pair of axes. `data` has the numbers for the page's script."""

    values: Sequence[tuple[float, str]]  # y and label of the horizontal lines
    steps: Sequence[tuple[float, str]]  # x and label
    lines: Sequence[Line]
    data: Mapping[str, Any]


def draw(series: Sequence[Series]) -> Chart:
    """The chart of some series, each of which has a point or more."""
    curves = [thinned(points) for points in series]
    first, last = min(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)
    if first == last:
        first, last = first - 0.5, last + 0.5
    low, high = value_range([value for curve in curves for _, value in curve])

    def x(step: float) -> float:
        return round(LEFT + (step - first) / (last - first) * (RIGHT - LEFT), 1)

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (BOTTOM - TOP), 1)

    def path(curve: Series) -> str:
        return "M" + "L".join(f"{x(step)} {y(value)}" for step, value in curve)

    return Chart(
        values=[(y(tick), f"{tick:.10g}") for tick in round_ticks(low, high)],
        steps=[(x(tick), f"{tick:g}") for tick in round_ticks(first, last) if tick == int(tick)],
        lines=[
            Line(
                path=path(curve),
                trend=path(trend(points)) if is_noisy(points) else "",
                dots=[(x(step), y(value)) for step, value in curve] if len(curve) <= FEW else [],
            )
            for points, curve in zip(series, curves, strict=True)
        ],
        data={
            "range": [first, last],
            "lines": [
                {"x": [s for s, _ in curve], "y": [float(f"{v:.5g}") for _, v in curve]}
                for curve in curves
            ],
        },
    )


def thinned(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most about `limit` points. Of neighbouring steps the lowest and the highest value stay, so
    that no spike is lost.
    """
    size = math.ceil(2 * len(series) / limit)
    if size <= 2:
        return series
    groups = [series[start : start + size] for start in range(0, len(series), size)]
    kept = [
        {min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}
        for group in groups
    ]
    return [point for group in kept for point in sorted(group)]


def trend(series: Series, points: int = 80) -> Series:
    """Moving mean over a twentieth of the series to both sides, at about so many of its steps."""
    reach, last = len(series) // 20, len(series) - 1
    places = [*range(0, last, max(1, last // points)), last]
    windows = [series[max(0, place - reach) : place + reach + 1] for place in places]
    return [
        (series[place][0], fmean(value for _, value in window))
        for place, window in zip(places, windows, strict=True)
    ]


def is_noisy(series: Series) -> bool:
    """Whether a curve goes up and down so much that its moving mean is easier to read."""
    values = [value for _, value in series]
    travelled = sum(abs(after - before) for before, after in pairwise(values))
    return len(values) >= 30 and travelled > 4 * (max(values) - min(values))


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The range of the y axis: it shows all values, and zero too if they are constant or not far
    from zero.
    """
    low, high = min(values), max(values)
    constant = high - low <= 1e-9 * max(abs(low), abs(high))
    if constant or 0 < low < 0.4 * high:
        low = min(low, 0.0)
    if constant or 0.4 * low < high < 0:
        high = max(high, 0.0)
    if low == high:
        return 0.0, 1.0
    margin = 0.06 * (high - low)
    return low - margin * (low != 0), high + margin * (high != 0)


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers in [low, high]: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    apart = power * next(k for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    return [
        k * apart for k in range(math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9) + 1)
    ]
