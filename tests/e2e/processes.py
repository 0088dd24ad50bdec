"""Finds the descendants of a process that are still running (Linux only)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, identified uniquely by its process id and start time (kernel ticks)."""

    pid: int
    start: str
    command: str

    @property
    def running(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat[19] == self.start and stat[0] != "Z"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat that follow the process name: state, parent, ….

    Returns None if the process has ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[Process]:
    """Return all descendants of `pid`."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            process = Process(
                pid=int(entry.name), start=stat[19], command=_command(int(entry.name))
            )
            children.setdefault(int(stat[1]), []).append(process)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += [process.pid for process in below]
        found += below
    return found


def survivors(processes: Iterable[Process], *, within: float) -> list[str]:
    """Return the command lines of processes that are still running after `within` seconds."""
    deadline = time.monotonic() + within
    while left := [process.command for process in processes if process.running]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.2)
    return []
