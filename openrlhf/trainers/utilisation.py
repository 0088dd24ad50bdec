"""How much of a step the models worked, and how much of it side by side."""

from collections.abc import Sequence
from itertools import chain

from openrlhf.cluster.worker_group import Span
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.rollout.measures import concurrency


def utilisation(groups: Sequence[Sequence[Span]], seconds: float) -> dict[str, Metric]:
    """Metrics of a step of so many seconds. `groups`: when the roles of each group of processes
    worked, one at a time.
    """
    working = concurrency(chain.from_iterable(groups))
    busy = sum(number * time for number, time in working)
    return {
        "timing/models_idle": Mean(max(0.0, len(groups) * seconds - busy), len(groups) * seconds),
        "timing/models_overlap": Mean(
            sum(time for number, time in working if number > 1), sum(time for _, time in working)
        ),
    }
