"""Tests of environment variables and of ports that the system gives to no other socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from openrlhf.training import devices

RAY_WORKERS = range(10_002, 20_000)  # Ray's default range


def test_free_port_is_outside_the_kernel_and_ray_ranges() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = devices.free_port()
        assert not first <= port <= last and port not in RAY_WORKERS
        with socket.socket() as user:
            user.bind(("", port))


def test_worker_environment_hides_gpus_from_cpu_processes() -> None:
    assert devices.worker_environment("cpu", threads=1)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in devices.worker_environment("cuda", threads=1)


def test_free_port_skips_a_port_in_use_and_raises_if_none_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as one:
        used = devices.free_port()
        one.bind(("", used))
        monkeypatch.setattr(devices, "OWN_PORTS", range(used, used + 1))
        with pytest.raises(OSError, match=rf"port.* {used} to {used} "):
            devices.free_port()
