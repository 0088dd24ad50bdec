"""A process that Ray kills because the machine runs out of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from openrlhf.cluster.worker_group import Call, WorkerError, wait_for

MOST_BYTES, PART_BYTES = 2 << 30, 64 << 20


class Hungry:
    """An actor that allocates memory until Ray kills it."""

    def eat(self) -> None:
        held: list[bytearray] = []
        while sum(map(len, held)) < MOST_BYTES:
            held.append(bytearray(b"x" * PART_BYTES))
        time.sleep(600)


@pytest.fixture
def hungry() -> Iterator[Any]:
    """Start Ray with a memory limit 2 % above current use, and yield an actor."""
    threshold = psutil.virtual_memory().percent / 100 + 0.02
    limits = {"memory_usage_threshold": threshold, "memory_monitor_refresh_ms": 100}
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _system_config=limits
    )
    actor: Any = ray.remote(Hungry)
    yield actor.remote()
    ray.shutdown()


def test_worker_error_after_an_out_of_memory_kill_names_the_log_and_a_fix(hungry: Any) -> None:
    call = Call((hungry.eat.remote(),), ("hungry.log",))
    with pytest.raises(WorkerError, match=r"eat.*memory.*micro-batches.*hungry\.log") as caught:
        wait_for([call], timeout_s=240, doing="eat")
    assert "\n" not in str(caught.value)
