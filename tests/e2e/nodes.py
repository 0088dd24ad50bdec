"""Ray nodes that `ray start` starts on this machine, and a shell to run commands in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.e2e.commands import LAUNCHER_VARIABLES
from tests.e2e.processes import descendants


def environment(**changes: str) -> dict[str, str]:
    """Return the shell environment of a user who has activated the virtual environment."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in LAUNCHER_VARIABLES and not k.startswith("RAY_")
    }
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"} | changes


def type_in(line: str, folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start a shell command in a folder, in its own session."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=variables,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def start_node(
    flags: str, folder: Path, variables: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a node with `ray start`, and return its process once the node reports that it is up."""
    with log.open("wb") as output:
        node = subprocess.Popen(
            ["ray", "start", *flags.split()],
            cwd=folder, env=variables, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 300
    while "will now block" not in log.read_text():
        assert node.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return node


def end(node: subprocess.Popen[bytes]) -> None:
    """Stop a node, and kill any of its processes that do not exit on their own."""
    below = descendants(node.pid)
    node.terminate()
    with suppress(subprocess.TimeoutExpired):
        node.wait(timeout=60)
    node.kill()
    node.wait()
    for process in below:
        if process.running:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
