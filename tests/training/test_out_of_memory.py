"""A process that Ray kills because the machine's memory is used up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from openrlhf.cluster.worker_group import Call, WorkerError, gather

MOST_BYTES, PART_BYTES = 2 << 30, 64 << 20


class Hungry:
    """Takes memory until it is killed."""

    def eat(self) -> None:
        held: list[bytearray] = []
        while sum(map(len, held)) < MOST_BYTES:
            held.append(bytearray(b"x" * PART_BYTES))
        time.sleep(600)


@pytest.fixture
def hungry() -> Iterator[Any]:
    """An actor of a Ray that has 2 % of the machine's memory left."""
    threshold = psutil.virtual_memory().percent / 100 + 0.02
    limits = {"memory_usage_threshold": threshold, "memory_monitor_refresh_ms": 100}
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _system_config=limits
    )
    actor: Any = ray.remote(Hungry)
    yield actor.remote()
    ray.shutdown()


def test_a_process_that_ray_kills_for_its_memory_is_named_with_what_to_do(hungry: Any) -> None:
    call = Call((hungry.eat.remote(),), ("hungry.log",))
    with pytest.raises(WorkerError, match=r"eat.*memory.*micro-batches.*hungry\.log") as caught:
        gather([call], timeout_s=240, doing="eat")
    assert "\n" not in str(caught.value)
