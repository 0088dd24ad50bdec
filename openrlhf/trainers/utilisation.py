"""Utilization of the models' processes during a step, and their overlap."""

from collections.abc import Sequence
from itertools import chain

from openrlhf.cluster.worker_group import Span
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.rollout.measures import concurrency


def utilisation(hosts: Sequence[Sequence[Span]], seconds: float) -> dict[str, Metric]:
    """Return the utilization metrics of a step that took `seconds`.

    `hosts` contains the busy spans of each set of processes. A set runs one role at a time.
    """
    busy = 0.0  # busy seconds, summed over the hosts
    some_busy = 0.0
    several_busy = 0.0
    for number, time in concurrency(chain.from_iterable(hosts)):
        busy += number * time
        some_busy += time
        if number > 1:
            several_busy += time
    available = len(hosts) * seconds
    return {
        "timing/models_idle": Mean(max(0.0, available - busy), available),
        "timing/models_overlap": Mean(several_busy, some_busy),
    }
