"""Line charts for the report: pure functions from the numbers of a run to positions in a drawing.

The page's template turns a `Chart` into SVG. Its script shows the values under the pointer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

Series = Sequence[tuple[float, float]]  # (step, value), ordered by step

# Size of the whole drawing, in its own units.
WIDTH = 360
HEIGHT = 168
# Edges of the plot area inside the drawing.
LEFT = 42
RIGHT = 352
TOP = 8
BOTTOM = 148

MAX_POINTS = 240  # of a drawn line
MAX_DOTS = 24  # a line with at most this many points marks each of them with a dot


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: its SVG path, the SVG path of its moving mean, and the positions of its dots.

    `trend` is empty unless the curve is noisy. A noisy curve is pale, with its trend over it.
    """

    path: str
    trend: str
    dots: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share one pair of axes. `data` has the numbers for the page's script."""

    values: Sequence[tuple[float, str]]  # y and label of each horizontal grid line
    steps: Sequence[tuple[float, str]]  # x and label of each tick of the x axis
    lines: Sequence[Line]
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The ranges of both axes, mapped to the plot area."""

    first_step: float
    last_step: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """Return the horizontal position of a step."""
        share = (step - self.first_step) / (self.last_step - self.first_step)
        return round(LEFT + share * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (self.high - value) / (self.high - self.low)
        return round(TOP + share * (BOTTOM - TOP), 1)

    def dots(self, curve: Series) -> list[tuple[float, float]]:
        """Return the positions of the points of a curve."""
        return [(self.x(step), self.y(value)) for step, value in curve]

    def path(self, curve: Series) -> str:
        """Return the SVG path of a curve."""
        return "M" + "L".join(f"{x} {y}" for x, y in self.dots(curve))


def draw(series: Sequence[Series]) -> Chart:
    """Return the chart of several series. Each series has at least one point."""
    curves = [thin_out(points) for points in series]
    axes = _fit_axes(curves)
    value_ticks = round_ticks(axes.low, axes.high)
    step_ticks = filter(float.is_integer, round_ticks(axes.first_step, axes.last_step))
    lines: list[Line] = []
    numbers: list[dict[str, list[float]]] = []
    for points, curve in zip(series, curves, strict=True):
        lines.append(_draw_line(points, curve, axes))
        steps, values = zip(*curve, strict=True)
        numbers.append({"x": list(steps), "y": [float(f"{value:.5g}") for value in values]})
    return Chart(
        values=[(axes.y(tick), f"{tick:.10g}") for tick in value_ticks],
        steps=[(axes.x(tick), f"{tick:g}") for tick in step_ticks],
        lines=lines,
        data={"range": [axes.first_step, axes.last_step], "lines": numbers},
    )


def _fit_axes(curves: Sequence[Series]) -> Axes:
    """Return axes that show all points of the curves."""
    steps: list[float] = []
    values: list[float] = []
    for curve in curves:
        for step, value in curve:
            steps.append(step)
            values.append(value)
    first_step = min(steps)
    last_step = max(steps)
    if first_step == last_step:
        first_step -= 0.5
        last_step += 0.5
    low, high = value_range(values)
    return Axes(first_step=first_step, last_step=last_step, low=low, high=high)


def _draw_line(points: Series, curve: Series, axes: Axes) -> Line:
    """Return the line of a series: `curve` has those of its `points` that are drawn."""
    moving_mean = ""
    if is_noisy(points):
        moving_mean = axes.path(trend(points))
    dots: list[tuple[float, float]] = []
    if len(curve) <= MAX_DOTS:
        dots = axes.dots(curve)
    return Line(path=axes.path(curve), trend=moving_mean, dots=dots)


def thin_out(series: Series, limit: int = MAX_POINTS) -> Series:
    """Return at most about `limit` points of the series.

    Of each group of neighboring steps the lowest and the highest value are kept, so that no spike
    disappears.
    """
    size = math.ceil(2 * len(series) / limit)
    if size <= 2:
        return series
    kept: list[tuple[float, float]] = []
    for start in range(0, len(series), size):
        group = series[start : start + size]
        lowest = min(group, key=lambda point: point[1])
        highest = max(group, key=lambda point: point[1])
        kept += sorted({lowest, highest})
    return kept


def trend(series: Series, points: int = 80) -> Series:
    """Return the moving mean of the series at about `points` of its steps.

    Each mean covers a twentieth of the series on either side of its step.
    """
    reach = len(series) // 20
    last = len(series) - 1
    places = [*range(0, last, max(1, last // points)), last]
    means: list[tuple[float, float]] = []
    for place in places:
        window = series[max(0, place - reach) : place + reach + 1]
        step, _ = series[place]
        means.append((step, fmean(value for _, value in window)))
    return means


def is_noisy(series: Series) -> bool:
    """Return whether a curve oscillates so much that its moving mean is easier to read."""
    if len(series) < 30:
        return False
    _, values = zip(*series, strict=True)
    distance = sum(abs(after - before) for before, after in pairwise(values))
    return distance > 4 * (max(values) - min(values))


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the y axis, which contains all values.

    The range also contains zero if the values are constant or not far from zero.
    """
    low = min(values)
    high = max(values)
    constant = high - low <= 1e-9 * max(abs(low), abs(high))
    if constant or 0 < low < 0.4 * high:
        low = min(low, 0.0)
    if constant or 0.4 * low < high < 0:
        high = max(high, 0.0)
    if low == high:
        return 0.0, 1.0
    margin = 0.06 * (high - low)
    if low != 0:
        low -= margin
    if high != 0:
        high += margin
    return low, high


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers in [low, high], 1, 2 or 5 times a power of ten apart."""
    least_spacing = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least_spacing))
    spacing = power
    for factor in (2, 5, 10):
        if spacing < least_spacing * 0.999:
            spacing = factor * power
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    return [multiple * spacing for multiple in range(first, last + 1)]
