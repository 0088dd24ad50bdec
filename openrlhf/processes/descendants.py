"""The end of all that a process of someone else's code has started, daemons too.

The parent of such a process calls `confinement.adopt_orphans` before the start and `end_all` afterwards: a process that
leaves its session or loses its parent becomes our child, and is found. Standard library only.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def end_all(child: int) -> int:
    """Kill and reap every process below this one. Returns the wait status of `child`."""
    statuses: dict[int, int] = {}
    while killed_some():  # a later round finds what was forked meanwhile
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses.update([ended])
        time.sleep(0.001)
    return statuses[child]


def reap_orphans(child: int) -> None:
    """Reap every ended process below this one but `child`: until then, each counts towards the limit of processes."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def killed_some() -> bool:
    """Kill every process below this one. Returns True if there was one, zombies included."""
    killed = False
    for pid in descendants():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def descendants() -> list[int]:
    """All processes below this one, as /proc shows them now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]
