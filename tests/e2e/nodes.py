"""Nodes of a Ray cluster on this machine, as `ray start` starts them, and a shell to type commands
in.
"""

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
    """That of a user in whose shell the virtual environment is active."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in LAUNCHER_VARIABLES and not k.startswith("RAY_")
    }
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"} | changes


def type_in(line: str, folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start a line of a shell in a folder, in a session of its own."""
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
    """`ray start`, as a process to end it by; returns when it says that it is up."""
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
    """End a node, and whatever of it does not end by itself."""
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
