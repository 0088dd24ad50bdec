"""Small line charts as inline SVG: pure functions from numbers to markup.

Colours come from the page's CSS variables (--line-0 …), so a chart follows light and dark mode.
The numbers travel in `data-chart` for the page's script, which shows values under the pointer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

WIDTH, HEIGHT = 360, 168  # of the whole drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 8, 20  # margins: y labels, the last x label, x labels
COLOURS = 6
MAX_POINTS = 240  # a line is drawn with at most so many


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step, or some neighbouring steps: where they end, their mean, lowest and highest value."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve, in the order of its steps."""

    label: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Maps steps and values to the drawing. Ticks are round numbers inside the range."""

    first: float
    last: float
    low: float
    high: float
    ticks: Sequence[float]

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def downsample(series: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points; neighbours share one, which keeps their mean and their extremes."""
    size = max(1, math.ceil(len(series) / limit))
    points: list[Point] = []
    for start in range(0, len(series), size):
        values = [value for _, value in series[start : start + size]]
        step = series[min(start + size, len(series)) - 1][0]
        mean = math.fsum(values) / len(values)
        points.append(Point(step=step, mean=mean, low=min(values), high=max(values)))
    return points


def smoothed(values: Sequence[float]) -> list[float]:
    """Moving mean over about a twentieth of the curve to both sides, so that it does not lag."""
    forth = _running_mean(values)
    back = _running_mean(values[::-1])[::-1]
    return [(before + after) / 2 for before, after in zip(forth, back, strict=True)]


def _running_mean(values: Sequence[float]) -> list[float]:
    """Exponential, without bias towards zero at the start."""
    decay = 1 - 1 / max(1.0, len(values) / 20)
    mean = weight = 0.0
    result: list[float] = []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        result.append(mean / weight)
    return result


def is_noisy(values: Sequence[float]) -> bool:
    """Whether a curve goes up and down so much that its moving mean says more than itself."""
    travelled = sum(abs(after - before) for before, after in pairwise(values))
    return len(values) >= 30 and travelled > 4 * (max(values) - min(values))


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers in [low, high]: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    apart = power * next(k for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    first = math.ceil(low / apart - 1e-9)
    return [k * apart for k in range(first, math.floor(high / apart + 1e-9) + 1)]


def tick_text(value: float, apart: float) -> str:
    """A tick's label, with as many digits as its neighbours need to differ."""
    if value == 0:
        return "0"
    size = max(abs(value), apart)
    if size >= 1e6 or apart < 1e-4:
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(apart) + 1e-9))
        return re.sub(r"e([+-])0*", r"e\1", f"{value:.{digits}e}").replace("e+", "e")
    if size >= 1e4 and apart >= 10:
        return f"{value / 1000:g}k"
    return f"{value:.{max(0, -math.floor(math.log10(apart) + 1e-9))}f}"


def frame_of(lines: Sequence[Line]) -> Frame:
    """The range that shows all points; it starts at zero where the values are not far from it."""
    points = [point for line in lines for point in line.points]
    low, high = min(point.low for point in points), max(point.high for point in points)
    if 0 < low < 0.4 * high:
        low = 0.0
    if high < 0 and high > 0.4 * low:
        high = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 1.0
        low, high = low - margin, high + margin
    else:
        margin = 0.06 * (high - low)
        low, high = low - margin * (low != 0), high + margin * (high != 0)
    first, last = min(point.step for point in points), max(point.step for point in points)
    if first == last:
        first, last = first - 0.5, last + 0.5
    return Frame(first=first, last=last, low=low, high=high, ticks=round_ticks(low, high))


def draw(lines: Sequence[Line], *, label: str) -> Markup:
    """The chart of `lines` (each has a point or more). `label` is read by screen readers."""
    frame = frame_of(lines)
    body = [*_axes(frame)]
    for index, line in enumerate(lines):
        body += _curve(line, frame, colour=f"var(--line-{index % COLOURS})")
    numbers = {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "range": [frame.first, frame.last, frame.low, frame.high],
        "lines": [
            {"x": [point.step for point in line.points], "y": [float(f"{point.mean:.5g}") for point in line.points]}
            for line in lines
        ],
    }
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, json.dumps(numbers), Markup("").join(map(Markup, body))
    )


def _axes(frame: Frame) -> list[str]:
    apart = frame.ticks[1] - frame.ticks[0] if len(frame.ticks) > 1 else frame.high - frame.low
    marks: list[str] = []
    for tick in frame.ticks:
        y = f"{frame.y(tick):.1f}"
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        text = tick_text(tick, apart)
        marks.append(f'<text x="{LEFT - 6}" y="{y}" dy="3" text-anchor="end">{text}</text>')
    steps = [step for step in round_ticks(frame.first, frame.last) if step == int(step)]
    for step in steps:
        x = f"{frame.x(step):.1f}"
        text = tick_text(step, steps[-1] - steps[0] or 1)
        marks.append(f'<text x="{x}" y="{HEIGHT - 5}" text-anchor="middle">{text}</text>')
    return marks


def _curve(line: Line, frame: Frame, *, colour: str) -> list[str]:
    xs = [frame.x(point.step) for point in line.points]
    means = [point.mean for point in line.points]
    marks: list[str] = []
    if any(point.low < point.high for point in line.points):
        upper = [(x, frame.y(point.high)) for x, point in zip(xs, line.points, strict=True)]
        lower = [(x, frame.y(point.low)) for x, point in zip(xs, line.points, strict=True)]
        marks.append(f'<path class="band" fill="{colour}" d="{_path(upper + lower[::-1])}Z"/>')
    noisy = is_noisy(means)
    raw = _path([(x, frame.y(mean)) for x, mean in zip(xs, means, strict=True)])
    marks.append(f'<path class="{"faint" if noisy else "curve"}" stroke="{colour}" d="{raw}"/>')
    if noisy:
        soft = _path([(x, frame.y(mean)) for x, mean in zip(xs, smoothed(means), strict=True)])
        marks.append(f'<path class="curve" stroke="{colour}" d="{soft}"/>')
    if len(means) <= 24:
        marks += [
            f'<circle r="2.2" fill="{colour}" cx="{x:.1f}" cy="{frame.y(mean):.1f}"/>'
            for x, mean in zip(xs, means, strict=True)
        ]
    return marks


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
