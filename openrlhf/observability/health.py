"""Notices about a run that learns nothing or falls apart: pure rules over the numbers that it logs.

The terminal and report.html give the same notices, because both read what metrics.jsonl has. Each kind of
sickness is reported once per run.
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


@dataclass(frozen=True)
class Rule:
    """A sickness, the metrics that show it (`metric` matches their whole names), and what their curves look like then.

    `holds` is asked about the first point of a curve and its latest `points`; if `at_end`, only of a run that has ended.
    """

    sickness: str
    metric: str
    points: int
    holds: Callable[[Point, Sequence[Point]], bool]
    at_end: bool = False


class Health:
    """Reads a run's numbers as they are logged, and gives each notice as soon as its rule applies."""

    def __init__(self) -> None:
        self._curves: dict[str, list[Point]] = {}
        self._reported: set[str] = set()

    def see(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """The new notices, given the numbers of a step or an evaluation. None stands for a number that is not finite."""
        for name, value in values.items():
            if _rules_of(name):
                error = values.get(f"{name.removesuffix('_pass1')}_score_stderr")
                point = Point(step, math.nan if value is None else value, math.nan if error is None else error)
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
            known = {rule.sickness, CAUSES.get(rule.sickness)} & self._reported
            if known or rule.at_end > ended or len(latest) < rule.points:
                continue
            if rule.holds(first, latest):
                self._reported.add(rule.sickness)
                since, now = latest[0].step, latest[-1].step
                steps = f"Step {now}" if since == now else f"Steps {since} to {now}"
                start = f" (at the start {first.value:.4g})" if first is not latest[0] else ""
                notices.append(f"{steps}: {name} is {latest[-1].value:.4g}{start}. {MEANING[rule.sickness]}")
        return notices


def notices_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All notices about a run, given the rows of its metrics.jsonl."""
    health = Health()
    return health.read(rows) + health.end()


@cache
def _rules_of(name: str) -> list[int]:
    return [number for number, rule in enumerate(RULES) if re.fullmatch(rule.metric, name)]


def _each(test: Callable[[float, float], bool]) -> Callable[[Point, Sequence[Point]], bool]:
    """`test(value, start of the curve)` holds for each of the latest points."""
    return lambda first, latest: all(test(point.value, first.value) for point in latest)


def _constant(first: Point, latest: Sequence[Point]) -> bool:
    values = [point.value for point in latest]
    return max(values) - min(values) <= 1e-6 * max(map(abs, values))


def _below_start(first: Point, latest: Sequence[Point]) -> bool:
    """By more than two standard errors of the difference."""
    return all(first.value - point.value > 2 * math.hypot(first.error, point.error) for point in latest)


def _rising(first: Point, latest: Sequence[Point]) -> bool:
    values = [point.value for point in latest]
    return values == sorted(values) and values[-1] > 1.05 * values[0]


MEANING: dict[str, str] = toml_beside(__file__)  # of each sickness, and what to look at
CAUSES = {"no update": "same rewards"}  # a sickness is not reported after its cause

_LOSS, _PASS_RATE = r"train/(gpt_loss|loss|kto_loss|prm_loss)", r"eval/eval_.+_pass1"
RULES = (  # in the order of reporting
    Rule("not finite", r"train/nonfinite_steps", 1, _each(lambda x, _: x > 0)),
    Rule("not finite", r"train/(\w+_)?(loss|grad_norm|kl|reward|values)", 1, _each(lambda x, _: not math.isfinite(x))),
    Rule("same rewards", r"train/dead_groups", 5, _each(lambda x, _: x > 1 - 1e-9)),
    Rule("same rewards", r"train/reward", 5, _constant),
    Rule("no update", r"train/(actor_|critic_)?(lr|grad_norm)", 5, _each(lambda x, _: x == 0)),
    Rule("no update", _LOSS, 5, _constant),
    Rule(
        "no update", r"train/(actor_)?lr", 1, lambda first, latest: first == latest[0] and not first.value, at_end=True
    ),
    Rule("divergence", _LOSS, 5, _each(lambda x, start: x > 1.5 * start + 0.5)),
    Rule("overfitting", r"eval/(eval gpt_loss|eval_loss|eval prm_loss)", 3, _rising),
    Rule("drift", r"train/kl", 3, _each(lambda x, _: abs(x) > 1)),
    # From 0.19 on held-out scores fell, up to 0.08 they did not: docs/results/learning_rates.md.
    Rule("leap", r"train/kl", 2, lambda _, latest: latest[1].value - latest[0].value > 0.15),
    Rule("entropy collapse", r"train/entropy_loss", 5, _each(lambda x, start: x < 0.01 * start)),
    Rule("entropy growth", r"train/entropy_loss", 5, _each(lambda x, start: x > 2 * start + 1)),
    Rule("chance", r"train/acc", 30, lambda _, latest: fmean(point.value for point in latest) < 0.53, at_end=True),
    Rule("truncation", r"train/truncated", 5, _each(lambda x, _: x > 0.95)),
    Rule("mismatch", r"train/logprob_gap_mean", 3, _each(lambda x, _: x > 0.1)),
    Rule("mismatch", r"train/rollout_ratio", 3, _each(lambda x, _: abs(x - 1) > 0.2)),
    Rule("empty responses", r"train/response_length", 5, _each(lambda x, _: x <= 1)),
    Rule("regression", _PASS_RATE, 2, _below_start),
    Rule("regression", _PASS_RATE, 1, _below_start, at_end=True),
)
