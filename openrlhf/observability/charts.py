"""Lines for the report's charts: downsampled curves, with moving averages of noisy curves.

The page's script draws the lines with uPlot.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

Curve = Sequence[tuple[float, float]]  # (step, value), ordered by step

MAX_POINTS = 480  # maximum number of points in a line


class Line(NamedTuple):
    """One line of a chart.

    A pale line is followed by an unlabeled line that shows its moving average.
    """

    label: str
    color: int  # index into the page's color list
    pale: bool
    steps: list[float]
    values: list[float]


def make_lines(curves: Mapping[str, Curve]) -> list[Line]:
    """Return the lines of a chart, given its curves by label."""
    lines: list[Line] = []
    for color, (label, curve) in enumerate(curves.items()):
        noisy = is_noisy(curve)
        lines.append(_make_line(label, color, noisy, thin_out(curve)))
        if noisy:
            lines.append(_make_line("", color, False, trend(curve)))
    return lines


def _make_line(label: str, color: int, pale: bool, curve: Curve) -> Line:
    steps = [step for step, _ in curve]
    values = [float(f"{value:.8g}") for _, value in curve]  # the page rounds to 4 digits
    return Line(label, color, pale, steps, values)


def thin_out(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """Downsample a curve to about `limit` points.

    Keeps the first and last points, and the lowest and highest value in each group of neighboring
    steps, so that no spike disappears.
    """
    size = math.ceil(2 * len(curve) / limit)
    if size <= 2:
        return curve
    kept = {curve[0], curve[-1]}
    for start in range(0, len(curve), size):
        group = curve[start : start + size]
        kept.add(min(group, key=lambda point: point[1]))
        kept.add(max(group, key=lambda point: point[1]))
    return sorted(kept)


def trend(curve: Curve, points: int = 80) -> Curve:
    """Return the moving average of the curve at its last step and at most `points` earlier steps.

    Each average covers a twentieth of the curve on either side of its step.
    """
    reach = len(curve) // 20
    last = len(curve) - 1
    means: list[tuple[float, float]] = []
    stride = max(1, math.ceil(last / points))
    for place in [*range(0, last, stride), last]:
        window = curve[max(0, place - reach) : place + reach + 1]
        step, _ = curve[place]
        means.append((step, fmean(value for _, value in window)))
    return means


def is_noisy(curve: Curve) -> bool:
    """Return whether a curve oscillates so much that its moving average is easier to read."""
    if len(curve) < 30:
        return False
    values = [value for _, value in curve]
    distance = sum(abs(after - before) for before, after in pairwise(values))
    return distance > 4 * (max(values) - min(values))
