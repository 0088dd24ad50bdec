"""CPU seconds of a command and of all processes it starts, at every row of a file that it writes. Linux."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(kw_only=True)
class Course:
    """A finished command. `marks` has CPU and wall seconds since the start, at each row of the followed file."""

    marks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    cpu: float = 0.0
    wall: float = 0.0
    peak_bytes: int = 0  # resident memory of all processes together; shared pages count in each

    def steps(self) -> list[tuple[float, float]]:
        """CPU and wall seconds from each mark to the next."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def follow(command: Sequence[str], rows: Path, *, environment: Mapping[str, str], log: Path) -> Course:
    """Run a command to its end. Raises RuntimeError if it fails."""
    course, started = Course(), time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None:
            seen = rows.read_bytes().count(b"\n") if rows.exists() else 0
            cpu, memory = usage(process.pid)
            course.cpu, course.peak_bytes = max(course.cpu, cpu), max(course.peak_bytes, memory)
            if seen > len(course.marks):
                course.marks += [(cpu, time.perf_counter() - started)] * (seen - len(course.marks))
            time.sleep(0.02)
    course.wall = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return course


def usage(root: int) -> tuple[float, int]:
    """CPU seconds, of ended children too, and bytes of resident memory of a process and everything below it."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
    children: dict[int, list[int]] = {}
    for number, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(number)
    ticks, pages, waiting = 0, 0, [root]
    while waiting:
        number = waiting.pop()
        waiting += children.get(number, [])
        if number in stats:
            ticks += sum(map(int, stats[number][11:15]))  # utime, stime, cutime, cstime
            pages += int(stats[number][21])
    return ticks / TICKS, pages * PAGE
