"""The cost of generation: prompt tokens found in the cache, and time in which only a few long samples ran."""

from collections.abc import Sequence
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
    tail, total = tail_seconds([(cost.asked, cost.asked + cost.seconds) for cost in costs])
    return {
        "timing/prefill_cached": Mean(sum(c.cached_tokens for c in costs), sum(c.prompt_tokens for c in costs)),
        "timing/tail_share": Mean(tail, total),
    }


def tail_seconds(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds with less than a tenth as many running samples as at the peak, and seconds with any running sample.

    Example: 20 samples run from 0 to 1, and one of them until 4: (3, 4).
    """
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = list(accumulate(change for _, change in changes))
    peak = max(running, default=0)
    lasted = [(count, end - start) for count, ((start, _), (end, _)) in zip(running, pairwise(changes), strict=False)]
    busy = [(count, seconds) for count, seconds in lasted if count]
    return sum(seconds for count, seconds in busy if 10 * count < peak), sum(seconds for _, seconds in busy)
