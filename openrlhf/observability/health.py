"""Notices about a run that learns nothing or falls apart: pure rules over the numbers that it logs.

The terminal and report.html give the same notices, because both read what metrics.jsonl has. Each
kind of sickness is reported once per run.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from openrlhf.config.flags import toml_beside


class Point(NamedTuple):
    """A value of a metric, the step of it, and its standard error (NaN if none is logged)."""

    step: int
    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A sickness, the metrics that show it (`metric` matches their whole names), and how their
    curves look then.

    The latest `points` (0: all) pass the test `looks`, one of `TESTS`. Its limit is `limit`, plus
    `of_start` times the first value of the curve. With `at_end`, only a run that has ended is
    tested. A curve has `least` points.
    """

    sickness: str
    metric: str
    looks: str
    points: int
    limit: float = 0.0
    of_start: float = 0.0
    at_end: bool = False
    least: int = 1

    def holds(self, first: Point, latest: Sequence[Point]) -> bool:
        """Whether the latest points of a curve with this first one show the sickness."""
        return TESTS[self.looks](
            first, latest, self.limit + (self.of_start and self.of_start * first.value)
        )


class Health:
    """Reads a run's numbers as they are logged, and gives each notice as soon as its rule applies."""

    def __init__(self) -> None:
        self._curves: dict[str, list[Point]] = {}
        self._reported: set[str] = set()

    def see(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """The new notices, given the numbers of a step or an evaluation. None stands for a number
        that is not finite.
        """
        for name, value in values.items():
            if _rules_of(name):
                error = values.get(f"{name.removesuffix('_pass1')}_score_stderr")
                point = Point(
                    step, math.nan if value is None else value, math.nan if error is None else error
                )
                self._curves.setdefault(name, []).append(point)
        return self._notices(values)

    def read(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """The new notices, given rows of metrics.jsonl."""
        notices: list[str] = []
        for row in rows:
            notices += self.see(row["step"], row)
        return notices

    def end(self) -> list[str]:
        """The new notices once the run has ended."""
        return self._notices(self._curves, ended=True)

    def _notices(self, names: Iterable[str], *, ended: bool = False) -> list[str]:
        notices: list[str] = []
        for number, name in sorted((number, each) for each in names for number in _rules_of(each)):
            rule, curve = RULES[number], self._curves[name]
            first, latest = curve[0], curve[-rule.points :]
            known = {rule.sickness, *_causes_of(rule.sickness)} & self._reported
            if known or rule.at_end > ended or len(latest) < max(rule.points, rule.least):
                continue
            if rule.holds(first, latest):
                self._reported.add(rule.sickness)
                since, now = latest[0].step, latest[-1].step
                steps = f"Step {now}" if since == now else f"Steps {since} to {now}"
                start = f" (at the start {first.value:.4g})" if first is not latest[0] else ""
                notices.append(
                    f"{steps}: {name} is {latest[-1].value:.4g}{start}. {MEANING[rule.sickness]}"
                )
        return notices


def notices_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All notices about a run, given the rows of its metrics.jsonl."""
    health = Health()
    return health.read(rows) + health.end()


def _causes_of(sickness: str) -> list[str]:
    """Return the cause of a sickness, the cause of that, and so on."""
    causes: list[str] = []
    while sickness in CAUSES:
        sickness = CAUSES[sickness]
        causes.append(sickness)
    return causes


@cache
def _rules_of(name: str) -> list[int]:
    return [number for number, rule in enumerate(RULES) if re.fullmatch(rule.metric, name)]


def _constant(_: Point, latest: Sequence[Point], limit: float) -> bool:
    values = [point.value for point in latest]
    return max(values) - min(values) <= limit * max(map(abs, values))


def _rising(_: Point, latest: Sequence[Point], limit: float) -> bool:
    values = [point.value for point in latest]
    return values == sorted(values) and values[-1] > limit * values[0]


# Of the first point of a curve, its latest points and a limit.
TESTS: dict[str, Callable[[Point, Sequence[Point], float], bool]] = {
    "above": lambda _, latest, limit: all(point.value > limit for point in latest),
    "below": lambda _, latest, limit: all(point.value < limit for point in latest),
    "far from 0": lambda _, latest, limit: all(abs(point.value) > limit for point in latest),
    "zero": lambda _, latest, limit: not any(point.value for point in latest),
    "not finite": lambda _, latest, limit: not any(math.isfinite(point.value) for point in latest),
    "mean below": lambda _, latest, limit: fmean(point.value for point in latest) < limit,
    "leap above": lambda _, latest, limit: latest[-1].value - latest[0].value > limit,
    # by so many standard errors of the difference
    "fallen": lambda a, latest, limit: all(
        a.value - b.value > limit * math.hypot(a.error, b.error) for b in latest
    ),
    "constant": _constant,
    "rising": _rising,
}
TABLES = toml_beside(__file__)
MEANING: dict[str, str] = TABLES["meaning"]  # of each sickness, and what to look at
CAUSES: dict[str, str] = TABLES["causes"]  # a sickness is not reported after its cause
RULES = [Rule(**row) for row in TABLES["rule"]]  # in the order of reporting
