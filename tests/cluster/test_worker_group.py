"""Calls to the workers of a role: which ranks get which data slice, whose result counts, and how a
wait ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from openrlhf.cluster.worker_group import HostHandles, WorkerError, WorkerGroup, gather
from openrlhf.training.layout import RankLayout


class Worker:
    """Says which rank did what."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def double(self, number: int) -> tuple[int, int]:
        return self.rank, 2 * number

    def fail_on_rank_3(self, number: int) -> int:
        if self.rank == 3:
            raise ValueError("rank 3 cannot")
        return number

    def sleep_on_rank_3(self, number: int) -> int:
        time.sleep(600 * (self.rank == 3))
        return number

    def die_on_rank_1(self, number: int) -> None:
        if self.rank == 1:
            time.sleep(1)
            os._exit(1)
        raise RuntimeError("Connection closed by peer")


class Host:
    """A worker host with one role, without a process group."""

    def __init__(self, rank: int) -> None:
        self.worker = Worker(rank)

    def call(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    """Four ranks, of which each two share a data slice."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    host: Any = ray.remote(Host)
    actors = [host.options(num_cpus=0).remote(rank) for rank in range(4)]
    logs = [f"host-{rank}.log" for rank in range(4)]
    hosts = HostHandles.__new__(HostHandles)  # around processes that are there already
    hosts.layout, hosts.actors, hosts.logs = RankLayout(dp=2, tp=2), actors, logs
    hosts.ordering, hosts.spans = threading.Lock(), []
    yield WorkerGroup(hosts, "actor")
    ray.shutdown()


def test_each_slice_goes_to_the_ranks_that_share_it_and_the_first_gives_the_result(
    group: WorkerGroup,
) -> None:
    assert group.slices == 2
    calls = group.launch(Worker.double, [10, 20])
    assert [ray.get(list(call.references)) for call in calls] == [
        [(0, 20), (1, 20)],
        [(2, 40), (3, 40)],
    ]
    assert gather(calls, timeout_s=240, doing="double") == [(0, 20), (2, 40)]


def test_a_broadcast_reaches_every_rank(group: WorkerGroup) -> None:
    assert gather(group.broadcast(Worker.double, 1), timeout_s=240, doing="double") == [
        (rank, 2) for rank in range(4)
    ]


def test_a_failure_on_any_rank_of_a_slice_is_raised(group: WorkerGroup) -> None:
    """With its own message and no more; the traceback of the worker is its cause."""
    with pytest.raises(ValueError) as raised:
        gather(group.launch(Worker.fail_on_rank_3, [1, 2]), timeout_s=240, doing="fail")
    assert str(raised.value) == "rank 3 cannot"
    assert "fail_on_rank_3" in str(raised.value.__cause__)


def test_a_rank_that_does_not_answer_is_named_with_its_log_and_the_flag(group: WorkerGroup) -> None:
    calls = group.launch(Worker.sleep_on_rank_3, [1, 2])
    with pytest.raises(
        WorkerError,
        match=r"1 of 4 processes did not sleep within 5 s: host-3\.log.*--train\.step_timeout",
    ):
        gather(calls, timeout_s=5, doing="sleep")


def test_a_process_that_died_is_named_although_its_peers_have_failed_before(
    group: WorkerGroup,
) -> None:
    """The last test: the process does not come back."""
    calls = group.launch(Worker.die_on_rank_1, [1, 2])
    with pytest.raises(
        WorkerError, match=r"(?s)a process died while the run was about to meet.*host-1\.log"
    ):
        gather(calls, timeout_s=240, doing="meet")
