"""The cost of generation: cached prompt tokens, and time during which only a few samples run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from openrlhf.observability.metrics import Mean, Metric


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """The cost of one sample, as reported by the engine."""

    asked: float  # time of the request on the controller's clock, in seconds
    seconds: float  # time from the request to the last token, including queueing
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the engine's cache


class Period(NamedTuple):
    """A period during which the number of running spans is constant."""

    running: int
    seconds: float


def generation_metrics(costs: Sequence[SampleCost]) -> dict[str, Metric]:
    """Return generation metrics for a step's samples."""
    spans: list[tuple[float, float]] = []
    prompt_tokens = 0
    cached_tokens = 0
    for cost in costs:
        spans.append((cost.asked, cost.asked + cost.seconds))
        prompt_tokens += cost.prompt_tokens
        cached_tokens += cost.cached_tokens
    periods = concurrency(spans)
    peak = max((period.running for period in periods), default=0)
    busy_s = 0.0
    tail_s = 0.0
    for period in periods:
        busy_s += period.seconds
        if 10 * period.running < peak:
            tail_s += period.seconds
    return {
        "timing/prefill_cached": Mean(cached_tokens, prompt_tokens),
        "timing/tail_share": Mean(tail_s, busy_s),
    }


def concurrency(spans: Iterable[tuple[float, float]]) -> list[Period]:
    """Return how many time spans overlap in each period, with the period's duration in seconds.

    Periods in which no span runs are omitted. Example: the spans from 0 to 3 and from 1 to 2 give
    [(1, 1), (2, 1), (1, 1)].
    """
    edges: list[tuple[float, int]] = []
    for start, end in spans:
        edges.append((start, 1))
        edges.append((end, -1))
    edges.sort()
    periods: list[Period] = []
    running = 0
    for (time, change), (next_time, _) in pairwise(edges):
        running += change
        if running:
            periods.append(Period(running, next_time - time))
    return periods
