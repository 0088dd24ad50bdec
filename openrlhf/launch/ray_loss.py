"""The end of a command whose Ray cluster has died.

Any further call to Ray may then end this process (`cluster/ray_watch.py`), so the main thread is
blocked. The thread that detected the death ends the process, or replaces it with the same command,
which starts a new Ray cluster.
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
from openrlhf.cluster.ray_watch import LostRay
from openrlhf.isolation.confinement import killed_some
from openrlhf.reporting import alert

CLOSE_TIMEOUT_S = 10.0  # to close reports and trackers
KILL_TIMEOUT_S = 5.0
# Environment variables that a command sets for the command that replaces it.
RESTARTS = "OPENRLHF_RESTARTS"  # the number of restarts of the run
CONTINUES_ITSELF = "OPENRLHF_CONTINUES_ITSELF"  # 1 if a restart added --ckpt.load_enable
ERROR_STATUS = 2  # exit status of a command that fails


class RayLoss:
    """The action when Ray has died, called by the thread that detected the death.

    `advice` returns the end of the error message. `restart` returns the flags to add to the command
    that replaces this one, or None to end the command.
    """

    def __init__(
        self,
        advice: Callable[[], str] = lambda: "Start the command again.",
        restart: Callable[[LostRay], list[str] | None] = lambda lost: None,
    ) -> None:
        self._advice = advice
        self._restart = restart
        self._closings: list[Callable[[], None]] = []
        self.finished = False  # True: the command has done its work and only has to exit

    @contextmanager
    def closing(self, close: Callable[[], None]) -> Iterator[None]:
        """Call `close` if Ray dies before the block exits."""
        self._closings.append(close)
        try:
            yield
        finally:
            self._closings.remove(close)

    def __call__(self, lost: LostRay) -> NoReturn:
        """End or replace this process."""
        termination.hold_main_thread()
        flags = None
        with suppress(Exception):  # the process ends even if this fails
            if not self.finished and not termination.asked():
                flags = self._restart(lost)
                if flags is None:
                    alert(f"error: {lost} {self._advice()}")
            self._close()
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

    def _close(self) -> None:
        """Call the registered functions, for at most CLOSE_TIMEOUT_S in total."""

        def close_all() -> None:
            for close in reversed(self._closings):
                close()

        thread = threading.Thread(target=close_all, daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)


def inherited(variable: str) -> int:
    """Return the number that the replaced command stored in an environment variable, or 0.

    The variable is removed, so that child processes do not see it.
    """
    return int(os.environ.pop(variable, "0"))


def can_replace_process() -> bool:
    """Return whether this process runs one of our commands, not a notebook or a test."""
    program = Path(sys.argv[0])
    commands = Path(__file__).resolve().parent.parent / "cli"
    return program.name == "openrlhf" or program.resolve().parent == commands


def replace_process(flags: list[str]) -> NoReturn:
    """Replace this process with the same command and additional flags."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *flags])


def kill_processes(*, of_ray: bool) -> None:
    """Kill all descendants of this process.

    `of_ray`: also kill the processes of the Ray cluster that this process started.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        killed = killed_some()
        if of_ray:  # the children of a dead raylet are no longer descendants
            killed = kill_started_ray() or killed
        if not killed:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
