"""Measures the CPU seconds that a command and its descendants use per row added to a file.

Works only on Linux.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

LOOK_S = 0.5  # seconds between memory measurements


@dataclass(kw_only=True)
class Course:
    """The CPU seconds at each row and the peak resident memory of a finished command."""

    marks: list[float] = field(default_factory=list[float])
    first_row_s: float = 0.0  # wall-clock time since the start of the command
    peak_bytes: int = 0  # sum over all processes, so shared memory is counted repeatedly

    def steps(self, rows: int) -> list[float]:
        """Return the CPU seconds between consecutive rows.

        Raises ValueError if the number of rows is not `rows`.
        """
        if len(self.marks) != rows:
            raise ValueError(f"the command logged {len(self.marks)} steps instead of {rows}")
        return [after - before for before, after in pairwise(self.marks)]


def follow(
    command: Sequence[str], rows: Path, *, environment: Mapping[str, str], log: Path
) -> Course:
    """Run a command to completion. Raises RuntimeError if the command fails."""
    course, started, looked = Course(), time.monotonic(), 0.0
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                seen = trained(rows)
                if (
                    seen > len(course.marks) or time.monotonic() > looked + LOOK_S
                ):  # a memory measurement takes 5 ms
                    cpu, memory = usage(process.pid)
                    if seen and not course.marks:
                        course.first_row_s = time.monotonic() - started
                    course.marks += [cpu] * (seen - len(course.marks))
                    course.peak_bytes, looked = max(course.peak_bytes, memory), time.monotonic()
                time.sleep(0.02)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited with {process.returncode}:\n{log.read_text()[-3000:]}"
        )
    return course


def trained(rows: Path) -> int:
    """Return the number of training steps in a metrics file.

    Incomplete lines and evaluations are ignored.
    """
    return (
        sum(b'"train/' in line for line in rows.read_bytes().split(b"\n")[:-1])
        if rows.exists()
        else 0
    )


def usage(root: int) -> tuple[float, int]:
    """Return the CPU seconds and resident bytes of a process and all its descendants.

    An exited child is counted only if its parent waited for it. The raylet does not wait, so CPU
    time spent by its children at the start of a run is missing.
    """
    cpu, memory = 0.0, 0
    parent = psutil.Process(root)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            cpu += sum(
                process.cpu_times()[:4]
            )  # user and system time of the process and its exited children
            memory += process.memory_info().rss
    return cpu, memory
