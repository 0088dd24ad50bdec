"""Ports for process groups: free, and not handed out to anybody else until they are bound."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from openrlhf.training import devices

RAY_WORKERS = range(10_002, 20_000)  # the default of `ray start`


def test_a_free_port_is_none_that_the_kernel_or_ray_gives_to_other_sockets() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = devices.free_port()
        assert not first <= port <= last and port not in RAY_WORKERS
        with socket.socket() as user:
            user.bind(("", port))


def test_a_process_of_a_run_on_cpus_sees_no_gpu_of_its_node() -> None:
    assert devices.worker_environment("cpu", threads=1)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in devices.worker_environment("cuda", threads=1)


def test_a_port_in_use_is_passed_over_and_a_machine_without_ports_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as one:
        used = devices.free_port()
        one.bind(("", used))
        monkeypatch.setattr(devices, "OWN_PORTS", range(used, used + 1))
        with pytest.raises(OSError, match=f"no TCP port of {used} to {used} is free"):
            devices.free_port()
