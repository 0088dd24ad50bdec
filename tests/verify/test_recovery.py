"""Measures how long fault detection and recovery take, for docs/fault_tolerance.md.

A hanging engine and a lost machine are detected by deadlines, so their detection times follow from
flags and Ray's settings.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from tests.e2e.commands import as_arguments, launch
from tests.e2e.conftest import own_folder
from tests.e2e.nodes import type_in
from tests.e2e.processes import descendants
from tests.e2e.test_nodes import cluster, submitted
from tests.e2e.test_survival import flags, workspace
from tests.ranks import ROOT
from tests.verify.results import versions

pytestmark = pytest.mark.verify
__all__ = ["cluster", "own_folder", "workspace"]
PAGE = ROOT / "docs/fault_tolerance.md"
BEGIN, END = "<!-- seconds -->", "<!-- end of seconds -->"
LONG = {"train.num_episodes": 80, "ckpt.save_steps": 1}
FOUND: dict[str, str] = {}


class Watched:
    """A running command, and the times at which it printed its lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line))

    def wait_for(self, pattern: str, *, after: float = 0.0) -> float:
        """Wait for the first matching line printed after a given time, and return its time."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            for moment, line in list(self.lines):
                if moment > after and re.search(pattern, line):
                    return moment
            assert self.process.poll() is None, "".join(line for _, line in self.lines)
            time.sleep(0.02)
        raise AssertionError(
            f"{pattern} was not printed:\n" + "".join(line for _, line in self.lines)
        )

    def kill(self, number: signal.Signals, to: str) -> float:
        """Send a signal to the run's first process with this name, or to the command itself.

        Returns the time of the signal.
        """
        pids = (
            [each.pid for each in descendants(self.process.pid) if to in each.command]
            if to
            else [self.process.pid]
        )
        moment = time.monotonic()
        os.kill(pids[0], number)
        return moment


@contextmanager
def watched(process: subprocess.Popen[str]) -> Iterator[Watched]:
    """Run the command until the block exits, then kill it with all its descendants."""
    try:
        yield Watched(process)
    finally:
        below = descendants(process.pid)
        for pid in [process.pid, *(each.pid for each in below if each.running)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def put_on_record(fault: str, noticed: float | None, goes_on: float, how: str) -> None:
    """Add a fault's row to the table of all faults tested in this session."""
    seen = "" if noticed is None else f"{noticed:.1f}"
    FOUND[fault] = f"| {fault} | {seen} | {goes_on:.1f} | {how} |"
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    head = ["| fault | detected, s | recovered, s | recovery time |", "|---|---|---|---|"]
    note = (
        f"`python -m pytest -m verify tests/verify/test_recovery.py`, {versions()}, two cores; a "
        "model with 0.1 M parameters, so that the times are those of the recovery mechanism:"
    )
    PAGE.write_text(
        before + "\n\n".join([BEGIN, note, "\n".join([*head, *FOUND.values()]), END]) + after,
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    ("fault", "number", "more"),
    [
        ("an engine is killed", signal.SIGKILL, {}),
        ("an engine hangs (`--vllm.hang_timeout 3`)", signal.SIGSTOP, {"vllm.hang_timeout": 3}),
    ],
)
def test_recovery_time_after_an_engine_is_lost(
    fault: str, number: signal.Signals, more: dict[str, Any], workspace: Path
) -> None:
    folder = workspace / f"engine-{number}"
    with watched(
        launch("train_ppo_ray", flags(workspace, folder, **LONG, **more, **{"vllm.num_engines": 2}))
    ) as run:
        run.wait_for("^step +2/")
        moment = run.kill(number, "RolloutEngine")
        lost = run.wait_for("was lost", after=moment)
        back = run.wait_for("is up after", after=lost)
        run.wait_for("^step ", after=back)
    put_on_record(
        fault,
        lost - moment,
        back - moment,
        "until the engine serves again; the other engines keep running",
    )


def test_recovery_time_after_a_training_process_is_killed(workspace: Path) -> None:
    with watched(
        launch(
            "train_ppo_ray",
            flags(workspace, workspace / "worker", **LONG, **{"train.max_restarts": 1}),
        )
    ) as run:
        run.wait_for("^step +2/")
        moment = run.kill(signal.SIGKILL, "WorkerHost")
        lost = run.wait_for("Restart 1 of 1", after=moment)
        back = run.wait_for("^step ", after=lost)
    put_on_record(
        "a training process is killed",
        lost - moment,
        back - moment,
        "until the first step after the newest checkpoint is done",
    )


def test_restart_and_shutdown_times_after_sigkill_and_sigterm(workspace: Path) -> None:
    settings = flags(workspace, workspace / "command", **LONG)
    with watched(launch("train_ppo_ray", settings)) as run:
        run.wait_for("^step +2/")
        run.kill(signal.SIGKILL, "")
    again = time.monotonic()
    with watched(launch("train_ppo_ray", settings | {"ckpt.load_enable": True})) as run:
        back = run.wait_for("^step ")
        moment = run.kill(signal.SIGTERM, "")
        assert run.process.wait(timeout=60) == 143
        ended = time.monotonic()
    put_on_record(
        "the command is killed",
        None,
        back - again,
        "until the first step after a manual restart of the command",
    )
    put_on_record(
        "SIGTERM", None, ended - moment, "until the step is saved and all processes have exited"
    )


def test_recovery_time_after_a_machine_is_lost(
    workspace: Path, cluster: tuple[dict[str, str], subprocess.Popen[bytes]]
) -> None:
    variables, second = cluster
    line = submitted(as_arguments(flags(workspace, workspace / "machine", **LONG)))
    with watched(type_in(line, workspace, variables | {"PYTHONUNBUFFERED": "1"})) as run:
        run.wait_for("^step +3/")
        moment = time.monotonic()
        for pid in [*(each.pid for each in descendants(second.pid)), second.pid]:
            os.kill(pid, signal.SIGKILL)
        lost = run.wait_for("was lost", after=moment)
        gone = run.wait_for("The machine of engine . is gone", after=lost)
    put_on_record(
        "a machine with an engine is gone",
        lost - moment,
        gone - moment,
        "until the other engines have taken over its samples",
    )
