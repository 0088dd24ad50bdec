"""The Ray that a process has started, and the Ray of the run that has started the process."""

from __future__ import annotations

import os
import subprocess

import pytest

from openrlhf.cluster.ray_cluster import STARTED_BY, kill_started_ray


def test_process_started_by_a_run_spares_the_ray_of_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(STARTED_BY, f"{os.getppid()}-1")  # as inherited
    of_the_run = subprocess.Popen(["sleep", "60"])
    try:
        assert not kill_started_ray()
        assert of_the_run.poll() is None
    finally:
        of_the_run.kill()
        of_the_run.wait()
