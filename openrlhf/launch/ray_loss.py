"""Ends or restarts a command whose Ray cluster has died.

After the cluster has died, any further Ray call could kill this process (see
`cluster/ray_watch.py`), so the main thread is blocked. The thread that detected the failure exits
the process, or replaces it with the same command, which starts a new Ray cluster.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from openrlhf import termination
from openrlhf.cluster.ray_cluster import kill_started_ray
from openrlhf.cluster.ray_watch import RayProcess
from openrlhf.isolation.confinement import killed_some
from openrlhf.reporting import alert

CLOSE_TIMEOUT_S = 10.0  # time limit for closing reports and trackers
KILL_TIMEOUT_S = 5.0
# Environment variables that pass the restart state to the process that replaces this process.
RESTARTS = "OPENRLHF_RESTARTS"  # number of restarts so far
CONTINUES_ITSELF = "OPENRLHF_CONTINUES_ITSELF"  # set to 1 if a restart added --ckpt.load_enable
ERROR_STATUS = 2  # exit status of a failed command


class RayLoss:
    """Handler for a Ray failure, called by the thread that detected the failure.

    `advice` returns the last sentence of the error message. `restart` returns the flags to append
    when restarting the command, or None to exit.
    """

    def __init__(
        self,
        advice: Callable[[], str] = lambda: "Start the command again.",
        restart: Callable[[RayProcess], list[str] | None] = lambda lost: None,
    ) -> None:
        self._advice = advice
        self._restart = restart
        self._close: Callable[[], None] | None = None
        self.finished = False  # True once the command's work is done and only the exit is left

    @contextmanager
    def closing(self, close: Callable[[], None]) -> Iterator[None]:
        """Call `close` if Ray dies before the block exits. Blocks must not nest."""
        self._close = close
        try:
            yield
        finally:
            self._close = None

    def __call__(self, lost: RayProcess) -> NoReturn:
        """Exit or replace this process."""
        termination.hold_main_thread()
        flags = None
        with suppress(Exception):  # the process must exit even if restarting or closing fails
            if not self.finished and not termination.asked():
                flags = self._restart(lost)
                if flags is None:
                    alert(f"error: {lost.death} {self._advice()}")
            if self._close:
                closing = threading.Thread(target=self._close, daemon=True)
                closing.start()
                closing.join(CLOSE_TIMEOUT_S)
        with suppress(Exception):
            kill_processes(of_ray=lost.own)
            if flags is not None and not termination.asked():
                replace_process(flags)
        with suppress(Exception):
            sys.stdout.flush()
        if flags is not None and termination.asked():
            termination.end_at_once()
        if self.finished:
            os._exit(0)
        os._exit(termination.asked() or ERROR_STATUS)


def inherited(variable: str) -> int:
    """Return the number that the previous process stored in an environment variable, or 0.

    Removes the variable, so that child processes do not inherit it.
    """
    return int(os.environ.pop(variable, "0"))


def can_replace_process() -> bool:
    """Return whether this process runs one of this package's commands, not a notebook or a test."""
    program = Path(sys.argv[0])
    commands = Path(__file__).resolve().parent.parent / "cli"
    return program.name == "openrlhf" or program.resolve().parent == commands


def replace_process(flags: list[str]) -> NoReturn:
    """Replace this process with a new run of its command, with additional flags."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *flags])


def kill_processes(*, of_ray: bool) -> None:
    """Kill all descendants of this process.

    If `of_ray` is true, also kill the processes of the Ray cluster started by this process.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        killed = killed_some()
        if of_ray:  # children of a dead raylet are no longer descendants of this process
            killed = kill_started_ray() or killed
        if not killed:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
