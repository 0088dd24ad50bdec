"""Notices about runs that do not learn or become unstable, from rules over the metrics.

A run checks every step, reports each problem once, and stores the notice in notices.jsonl. A
resumed run and report.html read the stored notices. For problems without a stored notice, they
check the steps in metrics.jsonl, which has every N-th step with --logger.logging_steps N. If N is
above 1, report.html may show a notice that the run did not print.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

from openrlhf.config.flags import toml_beside


class Point(NamedTuple):
    """A value of a metric, its step, and its standard error (NaN if not logged)."""

    step: int
    value: float
    error: float


Curve = Sequence[Point]
Shape = Literal[
    "above",
    "below",
    "far from 0",
    "zero",
    "not finite",
    "mean below",
    "leap above",
    "constant",
    "rising",
    "fallen",
]


@dataclass(frozen=True)
class Rule:
    """A problem, the metrics that reveal it, and the shape of their curves in an affected run.

    `metric` is a regular expression that must match the full name. The rule applies if the latest
    `points` of a curve (0: the entire curve) have the shape `looks`. The limit is `limit` plus
    `of_start` times the first value of the curve; `holds` defines how each shape uses the limit.
    Curves with fewer than `least` points are not checked. With `at_end`, the rule is checked only
    when the run ends.
    """

    problem: str
    metric: str
    looks: Shape
    limit: float = 0.0
    points: int = 5
    of_start: float = 0.0
    at_end: bool = False
    least: int = 1

    def latest(self, curve: Curve) -> Curve:
        """Return the points to be checked by the rule."""
        return curve[-self.points :]  # the entire curve if `points` is 0

    def holds(self, curve: Curve) -> bool:
        """Return whether the curve shows the problem."""
        latest = self.latest(curve)
        if len(latest) < max(self.points, self.least):
            return False
        start = curve[0]
        limit = self.limit
        if self.of_start:
            limit += self.of_start * start.value
        values = [point.value for point in latest]
        match self.looks:
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
            case "fallen":  # the values fell by more than `limit` standard errors of the difference
                return all(
                    start.value - point.value > limit * math.hypot(start.error, point.error)
                    for point in latest
                )


class Health:
    """A monitor of a run's numbers that returns each notice as soon as its rule applies.

    Problems that are the subject of `earlier` notices are not reported again.
    """

    def __init__(self, earlier: Iterable[str] = ()) -> None:
        self._curves: dict[str, list[Point]] = {}
        self._reported: set[str] = set()
        for notice in earlier:
            for problem, meaning in MEANING.items():
                if notice.endswith(meaning):
                    self._reported.add(problem)

    def see(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Return the new notices, given the numbers of a step or evaluation.

        None represents a non-finite number.
        """
        numbers = {name: math.nan if value is None else value for name, value in values.items()}
        for name, value in numbers.items():
            if _rules_of(name):
                error = numbers.get(f"{name.removesuffix('_pass1')}_score_stderr", math.nan)
                self._curves.setdefault(name, []).append(Point(step, value, error))
        return self._new_notices(values)

    def read(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return the new notices, given rows of metrics.jsonl."""
        notices: list[str] = []
        for row in rows:
            notices += self.see(row["step"], row)
        return notices

    def end(self) -> list[str]:
        """Return the new notices at the end of the run."""
        return self._new_notices(self._curves, ended=True)

    def _new_notices(self, names: Iterable[str], *, ended: bool = False) -> list[str]:
        """Return the new notices about these metrics, in the order of the rules."""
        checks: list[tuple[int, str]] = []
        for name in names:
            for number in _rules_of(name):
                checks.append((number, name))
        notices: list[str] = []
        for number, name in sorted(checks):
            rule = RULES[number]
            if (rule.at_end and not ended) or self._is_explained(rule.problem):
                continue
            if rule.holds(self._curves[name]):
                self._reported.add(rule.problem)
                notices.append(_notice(rule, name, self._curves[name]))
        return notices

    def _is_explained(self, problem: str) -> bool:
        """Return whether the problem or any direct or indirect cause of it has been reported."""
        if problem in self._reported:
            return True
        return problem in CAUSES and self._is_explained(CAUSES[problem])


def notices_of(rows: Iterable[Mapping[str, Any]], stored: Sequence[str] = ()) -> list[str]:
    """Return all notices about a run, given the rows of its metrics.jsonl.

    `stored` are the notices in its notices.jsonl.
    """
    health = Health(stored)
    return [*stored, *health.read(rows), *health.end()]


def _notice(rule: Rule, name: str, curve: Curve) -> str:
    latest = rule.latest(curve)
    end = latest[-1].step
    steps = f"Step {end}"
    if len(latest) > 1:
        steps = f"Steps {latest[0].step} to {end}"
    start = ""
    if len(latest) < len(curve):
        start = f" (at the start {curve[0].value:.4g})"
    return f"{steps}: {name} is {latest[-1].value:.4g}{start}. {MEANING[rule.problem]}"


@cache
def _rules_of(name: str) -> list[int]:
    """Return the positions in RULES of the rules that apply to a metric."""
    return [number for number, rule in enumerate(RULES) if re.fullmatch(rule.metric, name)]


MEANING: dict[str, str] = toml_beside(__file__)  # explanation of each problem and what to check
CAUSES = {  # a problem is not reported if its cause has already been reported
    "no update": "same rewards",
    "rounded away": "no update",
}
RULES = [  # sorted in the order in which notices are printed
    Rule("not finite", "train/nonfinite_steps", "above", points=1),
    Rule("not finite", r"train/(\w+_)?(loss|grad_norm|kl|reward|values)", "not finite", points=1),
    Rule("same rewards", "train/dead_groups", "above", 0.999999999),
    Rule("same rewards", "train/reward", "constant", 1e-6),
    Rule("nothing kept", "rollout/num_samples", "zero"),
    Rule("nothing kept", "rollout/num_samples", "zero", points=0, at_end=True),
    Rule("no update", "train/(actor_|critic_)?(lr|grad_norm)", "zero"),
    Rule("no update", "train/(gpt_loss|loss|kto_loss|prm_loss)", "constant", 1e-6),
    # `least=2`: the first warm-up step has a learning rate of 0.
    # An interrupted run may have only the first step.
    Rule("no update", "train/(actor_)?lr", "zero", points=0, least=2, at_end=True),
    Rule("rounded away", "train/(actor_|critic_)?changed_weights", "below", 0.001),
    Rule("divergence", "train/(gpt_loss|loss|kto_loss|prm_loss)", "above", 0.5, of_start=1.5),
    Rule("overfitting", "eval/(eval gpt_loss|eval_loss|eval prm_loss)", "rising", 1.05, points=3),
    Rule("drift", "train/kl", "far from 0", 1, points=3),
    # Held-out scores fell after leaps of the KL by 0.19 or more, but not after leaps by up to 0.08.
    # The data is in docs/results/learning_rates.md.
    Rule("leap", "train/kl", "leap above", 0.15, points=2),
    Rule("entropy collapse", "train/entropy_loss", "below", of_start=0.01),
    Rule("entropy growth", "train/entropy_loss", "above", 1, of_start=2),
    Rule("chance", "train/acc", "mean below", 0.53, points=30, at_end=True),
    Rule("less likely answers", "train/chosen_logratio", "below", -5),
    Rule("truncation", "train/truncated", "above", 0.8999),  # at least 90 % are truncated
    Rule("truncation", "train/truncated", "above", 0.8999, points=0, at_end=True),
    Rule("mismatch", "train/logprob_gap_mean", "above", 0.1, points=3),
    Rule("mismatch", "train/rollout_ratio", "above", 1.2, points=3),
    Rule("mismatch", "train/rollout_ratio", "below", 0.8, points=3),
    Rule("empty responses", "train/response_length", "below", 1.000001),
    Rule("regression", "eval/eval_.+_pass1", "fallen", 2, points=2),
    Rule("regression", "eval/eval_.+_pass1", "fallen", 2, points=1, at_end=True),
]
