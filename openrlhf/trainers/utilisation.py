"""How much of a step the models worked, and how much of it side by side."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from openrlhf.distributed.worker_group import Span
from openrlhf.observability.metrics import Mean, Metric


def utilisation(groups: Sequence[Sequence[Span]], seconds: float) -> dict[str, Metric]:
    """Metrics of a step of so many seconds. `groups`: when the roles of each group of processes worked, one at a time."""
    spans = [span for group in groups for span in group]
    edges = sorted([(span.began, 1) for span in spans] + [(span.ended, -1) for span in spans])
    working = accumulate(change for _, change in edges)
    lasted = [(number, end - start) for number, ((start, _), (end, _)) in zip(working, pairwise(edges), strict=False)]
    busy = sum(number * time for number, time in lasted)
    return {
        "timing/models_idle": Mean(max(0.0, len(groups) * seconds - busy), len(groups) * seconds),
        "timing/models_overlap": Mean(
            sum(time for number, time in lasted if number > 1), sum(time for number, time in lasted if number)
        ),
    }
