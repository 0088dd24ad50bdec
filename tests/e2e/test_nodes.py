"""End-to-end tests on a cluster of machines with different resources.

Roles are placed as requested, and losing a machine with engines loses no steps.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.training.devices import free_port
from tests.e2e.commands import as_arguments, column, finish, samples
from tests.e2e.nodes import end, environment, start_node, type_in
from tests.e2e.processes import descendants
from tests.e2e.test_survival import PROMPTS, SAMPLES, STEPS, flags, wait_for_step, workspace
from tests.ranks import ROOT

__all__ = ["workspace"]
ROOM = '{"engines":1}'  # each machine has room for one engine


@pytest.fixture(scope="module")
def cluster(workspace: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Start two machines: both run engines, and the first machine also trains.

    Returns a shell environment for the cluster, and the second machine.
    """
    home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    port, api = free_port(), free_port()
    variables = environment(HOME=str(home), RAY_AUTH_MODE="disabled", PYTHONPATH=str(ROOT))
    common = (
        "--num-cpus 1 --block --min-worker-port 0 --max-worker-port 0 "
        f"--dashboard-agent-listen-port 0 --resources {ROOM}"
    )
    head = (
        f"--head --port {port} --dashboard-port {api} --ray-client-server-port {free_port()} "
        "--labels kind=training"
    )
    second = f"--address 127.0.0.1:{port} --labels kind=generation"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for name, kind in (("first", head), ("second", second)):
            nodes.append(
                start_node(
                    f"{kind} {common} --temp-dir {home / name}",
                    workspace,
                    variables,
                    home / f"{name}.log",
                )
            )
        yield variables | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{api}"}, nodes[1]
    finally:
        for node in reversed(nodes):
            end(node)
        shutil.rmtree(home, ignore_errors=True)


def submitted(arguments: list[str]) -> str:
    """Submit a job that places its models on the first machine and an engine on each machine."""
    places = {
        "vllm.num_engines": 2,
        "placement.actor.resources": '{"kind": "training"}',
        "placement.vllm.resources": ROOM,
    }
    command = ["python", "-m", "openrlhf.cli.train_ppo_ray", *arguments, *as_arguments(places)]
    return shlex.join(["ray", "job", "submit", "--", *command])


@pytest.mark.verify
def test_run_continues_after_losing_a_machine_with_an_engine(
    workspace: Path, cluster: tuple[dict[str, str], subprocess.Popen[bytes]]
) -> None:
    variables, second = cluster
    folder = workspace / "lost-machine"
    line = submitted(as_arguments(flags(workspace, folder, **{"train.num_episodes": 6})))
    process = type_in(line, workspace, variables)
    wait_for_step(process, folder, 3)
    there = descendants(second.pid)
    started = [each.command.partition(".")[0] for each in there if each.command.startswith("ray::")]
    assert "ray::RolloutEngine" in started and "ray::WorkerHost" not in started
    for pid in [*(each.pid for each in there), second.pid]:
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.status == 0, done.printed + done.errors
    assert re.search(r"The machine of engine . is gone\. 1 engine\(s\) remain", done.printed)
    assert len(column(folder, "train/reward")) == 6 * STEPS
    counted = Counter(
        (row["step"], row["prompt_index"], row["sample_index"]) for row in samples(folder)
    )
    assert set(counted.values()) == {1} and len(counted) == 6 * PROMPTS * SAMPLES
