"""Fixtures for plans of published models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openrlhf.config import machine
from openrlhf.launch.plan_command import planned_config
from openrlhf.planning.cluster import parse_cluster
from openrlhf.planning.plan import Plan, make_plan
from tests.planning.models import write_models

Configure = Callable[[str, str], Any]
MakePlan = Callable[[str, str], Plan]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths to folders with the config.json files of published models."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def configure(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return the resolved configuration of a command line for a cluster.

    A model's name in braces, such as {llama2-7b}, is replaced by the model's path.
    """
    monkeypatch.setattr(machine, "cluster_gpus", None)
    monkeypatch.setattr(machine, "only_plans", False)
    monkeypatch.setenv("WORLD_SIZE", "1")

    def resolved(line: str, cluster: str) -> Any:
        for name, path in models.items():
            line = line.replace(f"{{{name}}}", path)
        command, *words = line.split()
        return planned_config(command, words, parse_cluster(cluster))

    return resolved


@pytest.fixture
def plan(configure: Configure) -> MakePlan:
    """Return the memory plan of a command line for a cluster."""

    def planned(line: str, cluster: str) -> Plan:
        return make_plan(configure(line, cluster), parse_cluster(cluster))

    return planned
