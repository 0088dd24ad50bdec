"""Notices about runs that do not learn or become unstable: pure rules over the logged numbers.

The terminal and report.html show the same notices, because both read the numbers of metrics.jsonl.
Each problem is reported once per run.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from openrlhf.config.flags import toml_beside


class Point(NamedTuple):
    """A value of a metric, its step, and its standard error (NaN if none is logged)."""

    step: int
    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A problem, the metrics that show it, and the shape of their curves if a run has it.

    `metric` is a regular expression for whole names. The rule applies if the latest `points` of a
    curve (0: the whole curve) have the shape that `looks` names; `has_shape` lists the shapes and
    what the limit means for each. The limit is `limit`, plus `of_start` times the first value of
    the curve. The rule needs a curve with at least `least` points; with `at_end`, it is only
    checked once the run has ended.
    """

    problem: str
    metric: str
    looks: str
    points: int
    limit: float = 0.0
    of_start: float = 0.0
    at_end: bool = False
    least: int = 1

    def latest(self, curve: Sequence[Point]) -> Sequence[Point]:
        """Return the points of the curve that the rule checks."""
        if self.points == 0:
            return curve
        return curve[-self.points :]

    def holds(self, curve: Sequence[Point]) -> bool:
        """Return whether the curve shows the problem."""
        latest = self.latest(curve)
        if len(latest) < max(self.points, self.least):
            return False
        limit = self.limit
        if self.of_start:
            limit += self.of_start * curve[0].value
        return has_shape(self.looks, limit, first=curve[0], latest=latest)


def has_shape(shape: str, limit: float, *, first: Point, latest: Sequence[Point]) -> bool:
    """Return whether the latest points of a curve that begins with `first` have a shape."""
    values = [point.value for point in latest]
    match shape:
        case "above":
            return all(value > limit for value in values)
        case "below":
            return all(value < limit for value in values)
        case "far from 0":
            return all(abs(value) > limit for value in values)
        case "zero":
            return not any(values)
        case "not finite":
            return not any(map(math.isfinite, values))
        case "mean below":
            return fmean(values) < limit
        case "leap above":
            return values[-1] - values[0] > limit
        case "constant":
            return max(values) - min(values) <= limit * max(map(abs, values))
        case "rising":
            return values == sorted(values) and values[-1] > limit * values[0]
        case "fallen":
            return all(_has_fallen(first, point, limit) for point in latest)
        case _:
            raise ValueError(f"unknown shape of a curve: {shape!r}")


def _has_fallen(first: Point, latest: Point, limit: float) -> bool:
    """Return whether a value fell by more than `limit` standard errors of the difference."""
    standard_error = math.hypot(first.error, latest.error)
    return first.value - latest.value > limit * standard_error


class Health:
    """Reader of the numbers of a run that returns each notice as soon as its rule applies."""

    def __init__(self) -> None:
        self._curves: dict[str, list[Point]] = {}
        self._reported: set[str] = set()

    def see(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Return the new notices, given the numbers of a step or an evaluation.

        None stands for a number that is not finite.
        """
        for name, value in values.items():
            if _rules_of(name):
                error = values.get(f"{name.removesuffix('_pass1')}_score_stderr")
                point = Point(step, _nan_if_none(value), _nan_if_none(error))
                self._curves.setdefault(name, []).append(point)
        return self._new_notices(values)

    def read(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return the new notices, given rows of metrics.jsonl."""
        notices: list[str] = []
        for row in rows:
            notices += self.see(row["step"], row)
        return notices

    def end(self) -> list[str]:
        """Return the new notices once the run has ended."""
        return self._new_notices(self._curves, ended=True)

    def _new_notices(self, names: Iterable[str], *, ended: bool = False) -> list[str]:
        """Return the new notices about the curves of these metrics, in the order of the rules."""
        checks: list[tuple[int, str]] = []
        for name in names:
            for rule_number in _rules_of(name):
                checks.append((rule_number, name))
        notices: list[str] = []
        for rule_number, name in sorted(checks):
            rule = RULES[rule_number]
            curve = self._curves[name]
            if rule.at_end and not ended:
                continue
            if self._is_explained(rule.problem):
                continue
            if rule.holds(curve):
                self._reported.add(rule.problem)
                notices.append(_notice(rule, name, curve))
        return notices

    def _is_explained(self, problem: str) -> bool:
        """Return whether the problem, its cause, the cause of that, and so on was reported."""
        if problem in self._reported:
            return True
        return problem in CAUSES and self._is_explained(CAUSES[problem])


def notices_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return all notices about a run, given the rows of its metrics.jsonl."""
    health = Health()
    return health.read(rows) + health.end()


def _nan_if_none(number: float | None) -> float:
    if number is None:
        return math.nan
    return number


def _notice(rule: Rule, name: str, curve: Sequence[Point]) -> str:
    latest = rule.latest(curve)
    begin = latest[0].step
    end = latest[-1].step
    steps = f"Steps {begin} to {end}"
    if begin == end:
        steps = f"Step {end}"
    start = ""
    if len(latest) < len(curve):
        start = f" (at the start {curve[0].value:.4g})"
    return f"{steps}: {name} is {latest[-1].value:.4g}{start}. {MEANING[rule.problem]}"


@cache
def _rules_of(name: str) -> list[int]:
    """Return the indices in `RULES` of the rules about a metric."""
    return [index for index, rule in enumerate(RULES) if re.fullmatch(rule.metric, name)]


_TABLES = toml_beside(__file__)
MEANING: dict[str, str] = _TABLES["meaning"]  # of each problem, and what to check
CAUSES: dict[str, str] = _TABLES["causes"]  # a problem is not reported after its cause
RULES = [Rule(**row) for row in _TABLES["rule"]]  # in the order of reporting
