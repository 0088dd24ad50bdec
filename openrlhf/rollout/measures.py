"""The cost of generation: prompt tokens found in the cache, and time in which only a few long
samples ran.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from openrlhf.observability.metrics import Mean, Metric


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """The cost of one sample, as the engine reported it."""

    asked: float  # seconds, on the controller's clock
    seconds: float  # from the request to the last token, waiting included
    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt that the engine had in its cache


def generation_metrics(costs: Sequence[SampleCost]) -> dict[str, Metric]:
    """The metrics of the samples of a step."""
    running = concurrency((cost.asked, cost.asked + cost.seconds) for cost in costs)
    peak = max((samples for samples, _ in running), default=0)
    tail = sum(seconds for samples, seconds in running if 10 * samples < peak)
    return {
        "timing/prefill_cached": Mean(
            sum(c.cached_tokens for c in costs), sum(c.prompt_tokens for c in costs)
        ),
        "timing/tail_share": Mean(tail, sum(seconds for _, seconds in running)),
    }


def concurrency(spans: Iterable[tuple[float, float]]) -> list[tuple[int, float]]:
    """How many of these spans of time lie side by side, and for how many seconds; times without any
    are left out.

    Example: of two spans, from 0 to 3 and from 1 to 2: [(1, 1), (2, 1), (1, 1)].
    """
    edges = sorted(edge for start, end in spans for edge in ((start, 1), (end, -1)))
    numbers = accumulate(change for _, change in edges)
    lasted = [
        (number, end - start)
        for number, ((start, _), (end, _)) in zip(numbers, pairwise(edges), strict=False)
    ]
    return [(number, seconds) for number, seconds in lasted if number]
