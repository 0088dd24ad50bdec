"""Calls to a role's workers: ranks and data slices, results, failures and timeouts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from openrlhf.cluster.worker_group import HostHandles, WorkerError, WorkerGroup, wait_for
from openrlhf.training.layout import RankLayout


class Worker:
    """A worker whose results include its rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def double(self, number: int) -> tuple[int, int]:
        return self.rank, 2 * number

    def fail_on_rank_3(self, number: int) -> int:
        if self.rank == 3:
            raise ValueError("rank 3 cannot")
        return number

    def sleep_on_rank_3(self, number: int) -> int:
        if self.rank == 3:
            time.sleep(600)
        return number

    def die_on_rank_1(self, number: int) -> None:
        if self.rank == 1:
            time.sleep(1)
            os._exit(1)
        raise RuntimeError("Connection closed by peer")


class Host:
    """A worker host with one role and no process group."""

    def __init__(self, rank: int) -> None:
        self.worker = Worker(rank)

    def call(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    """Yield a group of four ranks, with two ranks per data slice."""
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
    hosts = HostHandles.__new__(HostHandles)  # skips the constructor, which would start processes
    hosts.layout = RankLayout(dp=2, tp=2)
    hosts.actors = actors
    hosts.logs = logs
    hosts.ordering = threading.Lock()
    hosts.spans = []
    yield WorkerGroup(hosts, "actor")
    ray.shutdown()


def test_launch_sends_each_slice_to_its_ranks_and_gather_returns_the_first_result(
    group: WorkerGroup,
) -> None:
    assert group.slices == 2
    calls = group.launch(Worker.double, [10, 20])
    assert [ray.get(list(call.references)) for call in calls] == [
        [(0, 20), (1, 20)],
        [(2, 40), (3, 40)],
    ]
    assert wait_for(calls, timeout_s=240, doing="double") == [(0, 20), (2, 40)]


def test_broadcast_reaches_every_rank(group: WorkerGroup) -> None:
    assert wait_for(group.broadcast(Worker.double, 1), timeout_s=240, doing="double") == [
        (rank, 2) for rank in range(4)
    ]


def test_gather_raises_the_error_of_any_rank_in_a_slice(group: WorkerGroup) -> None:
    """The error keeps its message, and its cause contains the worker's traceback."""
    with pytest.raises(ValueError) as raised:
        wait_for(group.launch(Worker.fail_on_rank_3, [1, 2]), timeout_s=240, doing="fail")
    assert str(raised.value) == "rank 3 cannot"
    assert "fail_on_rank_3" in str(raised.value.__cause__)


def test_gather_timeout_error_names_the_log_of_the_rank_and_the_timeout_flag(
    group: WorkerGroup,
) -> None:
    calls = group.launch(Worker.sleep_on_rank_3, [1, 2])
    with pytest.raises(
        WorkerError,
        match=r"1 of 4 .*sleep within 5 s.* host-3\.log.*--train\.step_timeout",
    ):
        wait_for(calls, timeout_s=5, doing="sleep")


def test_gather_names_the_dead_process_even_if_its_peer_failed_first(
    group: WorkerGroup,
) -> None:
    """This test must run last, because the dead process is not restarted."""
    calls = group.launch(Worker.die_on_rank_1, [1, 2])
    with pytest.raises(WorkerError, match=r"(?s)died .*about to meet.*host-1\.log"):
        wait_for(calls, timeout_s=240, doing="meet")
