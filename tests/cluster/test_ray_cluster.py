"""Tests that a process kills only the Ray processes that it started."""

from __future__ import annotations

import os
import subprocess

import pytest

from openrlhf.cluster.ray_cluster import STARTED_BY, kill_started_ray


def test_kill_started_ray_does_not_kill_the_ray_processes_of_the_parent_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(STARTED_BY, f"{os.getppid()}-1")  # as if the parent run had set it
    ray_of_parent = subprocess.Popen(["sleep", "60"])
    try:
        assert not kill_started_ray()
        assert ray_of_parent.poll() is None
    finally:
        ray_of_parent.kill()
        ray_of_parent.wait()
