"""Checks for implausible numbers in a run's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from openrlhf.observability.glossary import MetricSpec, find_spec

ROUNDING = 1e-6  # how far a value may lie outside its range


def range_of(spec: MetricSpec) -> str:
    """Return the range as text: "0 to 1", "≥ 0", or "any"."""
    low, high = spec.bounds
    return f"{low:g} to {high:g}" if high < inf else f"≥ {low:g}" if low > -inf else "any"


def implausible(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a message for each implausible number in the rows of a metrics.jsonl.

    A number is implausible if it is not finite, lies outside its declared range, or exceeds
    another metric that bounds it.
    """
    found: list[str] = []
    for row in rows:
        for name, value in row.items():
            spec = find_spec(name)
            if spec and value is None:
                found.append(f"step {row['step']}: {name} is not a finite number")
            elif spec and not spec.bounds[0] - ROUNDING <= value <= spec.bounds[1] + ROUNDING:
                found.append(
                    f"step {row['step']}: {name} is {value:g}, and its range is {range_of(spec)}"
                )
        for smaller, larger in ORDERED:
            low, high = row.get(smaller), row.get(larger)
            if low is not None and high is not None and low > high + ROUNDING:
                found.append(
                    f"step {row['step']}: {smaller} is {low:g}, and {larger} is only {high:g}"
                )
    return found


ORDERED = (  # in each pair, the first number never exceeds the second
    ("train/logprob_gap_mean", "train/logprob_gap_max"),
    ("train/response_length", "train/total_length"),
    ("eval/eval_failed_episodes", "eval/eval_num_samples"),
)
