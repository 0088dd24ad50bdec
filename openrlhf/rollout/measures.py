"""What generation cost: prompts prefilled once or again, and engines that waited for a few long samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from openrlhf.observability.metrics import Mean, Metric


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """One sample as an engine answered it."""

    asked: float  # seconds, on the controller's clock
    seconds: float  # from then to its last token, waiting included
    prompt_tokens: int
    cached_tokens: int  # of the prompt, in the engine's cache already


def generation_metrics(costs: Sequence[SampleCost]) -> dict[str, Metric]:
    """The metrics of the samples of a step."""
    tail, total = tail_seconds([(cost.asked, cost.asked + cost.seconds) for cost in costs])
    return {
        "timing/prefill_cached": Mean(sum(c.cached_tokens for c in costs), sum(c.prompt_tokens for c in costs)),
        "timing/tail_share": Mean(tail, total),
    }


def tail_seconds(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds in which less than a tenth as many samples ran as at the peak, and seconds in which any ran.

    Example: 20 samples from 0 to 1, one of which goes on until 4: (3, 4).
    """
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = list(accumulate(change for _, change in changes))
    peak = max(running, default=0)
    lasted = [(count, end - start) for count, ((start, _), (end, _)) in zip(running, pairwise(changes), strict=False)]
    busy = [(count, seconds) for count, seconds in lasted if count]
    return sum(seconds for count, seconds in busy if 10 * count < peak), sum(seconds for _, seconds in busy)
