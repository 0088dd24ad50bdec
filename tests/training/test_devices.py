"""Tests for worker environment variables, kernel caches and free ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.training import devices
from tests.ranks import ROOT

# Multiplies bfloat16 matrices of many shapes, and prints the growth of the process in MiB.
PRODUCTS = """
import psutil
import torch
from openrlhf.training import devices
devices.complete_launcher_environment()
weight = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
def multiply(counts):
    for tokens in counts:
        states = torch.ones(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.linear(states, weight).sum().backward()
multiply(range(10, 40))
before = psutil.Process().memory_info().rss
multiply(range(40, 120))
print((psutil.Process().memory_info().rss - before) / 2**20)
"""
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


def test_number_of_cached_kernels_is_limited() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PRODUCTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40  # 157 MiB with the default caches of oneDNN and PyTorch


def test_free_port_skips_a_port_in_use_and_raises_if_none_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as one:
        used = devices.free_port()
        one.bind(("", used))
        monkeypatch.setattr(devices, "OWN_PORTS", range(used, used + 1))
        with pytest.raises(OSError, match=rf"port.* {used} to {used} "):
            devices.free_port()
