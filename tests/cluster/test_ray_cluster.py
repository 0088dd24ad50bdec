"""A Ray cluster that a run starts: its settings, and which processes the run may kill."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import parameter, services

from openrlhf.cluster.placement import Placement, PlacementError
from openrlhf.cluster.ray_cluster import STARTED_BY, kill_started_ray, ray_cluster


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


@pytest.mark.parametrize("of_user", [None, "5"])
def test_started_ray_has_workers_of_normal_priority_and_keeps_no_record_of_tasks(
    of_user: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own setting of the priority takes precedence."""
    options: dict[str, Any] = {}

    def init(*_: Any, **given: Any) -> None:
        options.update(given)
        raise RuntimeError("no Ray is needed")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(services, "ConsolePopen", services.ConsolePopen)
    monkeypatch.setattr(parameter, "RayParams", parameter.RayParams)
    monkeypatch.setenv(STARTED_BY, "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    if of_user:
        monkeypatch.setenv("RAY_worker_niceness", of_user)
    nothing = Placement(groups=(), on_gpus=False)
    with pytest.raises(PlacementError), ray_cluster(nothing, on_loss=print):
        pass
    settings = options["_system_config"]
    assert settings.get("worker_niceness") == (None if of_user else 0)
    assert settings["task_events_report_interval_ms"] == 0
