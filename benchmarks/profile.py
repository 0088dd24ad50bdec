"""Measures the CPU seconds of a GRPO step by part of the code and by process.

Requires py-spy, which is installed with Ray, and permission to use it. A part's share is its
fraction of py-spy's samples. The CPU seconds of a step include py-spy's slowdown.

python -m benchmarks.profile --size 25M --lengths equal --dtype fp32
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil

from benchmarks import workload
from benchmarks.processes import trained
from benchmarks.run import MEASURED, WARM_UP, Grpo

SPY = Path(sys.executable).parent / "py-spy"
RATE = 100  # samples per second
PARTS = (  # a sample counts toward the first part whose pattern occurs in its stack
    ("publication", "publication_receive"),
    ("publication", "send_weights"),
    ("engine: sampling", "sample_tokens"),
    ("engine: forward", "execute_model"),
    ("engine: scheduler", "Scheduler."),
    ("engine: transport", "_sockets"),
    ("engine: transport", "output_handler"),
    ("trainer: backward", "_engine_run_backward"),
    ("trainer: optimizer", "TrainEngine._step"),
    ("trainer: forward", "PolicyModel.forward"),
    ("controller: detokenising", "request_of"),
    ("controller: batches", "from_trajectories"),
)
ROLES = {
    "ray::RolloutEng": "engine",
    "ray::WorkerHost": "trainer",
}  # roles, keyed by process-name prefix
# innermost calls of a waiting thread, which py-spy may report as busy
WAITING = (
    "select (",
    "wait (",
    "poll (",
    "listen_error_messages",
    "recv (",
    "accept (",
    "main_loop (",
    "Thread.run (",
    "_worker (",
)


def watch(rows: Path, run: psutil.Process, folder: Path) -> dict[str, Path]:
    """Record the run's computing processes from the end of the warmup until the run exits.

    Returns the record files, keyed by role.
    """
    while run.is_running() and trained(rows) < WARM_UP:
        time.sleep(0.05)
    spies: list[subprocess.Popen[bytes]] = []
    records: dict[str, Path] = {}
    for process in [run, *run.children(recursive=True)]:
        role = "controller" if process == run else ROLES.get(process.name()[:15])
        if role:
            records[role] = folder / f"{role}.txt"
            command = [
                SPY,
                "record",
                "-p",
                process.pid,
                "-r",
                RATE,
                "-f",
                "raw",
                "-o",
                records[role],
                "-d",
                3600,
            ]
            spies.append(
                subprocess.Popen(
                    list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
    for spy in spies:
        spy.wait()
    return records


def samples(record: Path) -> Iterator[tuple[str, int]]:
    """Yield each stack in which the process was computing, with its number of samples."""
    for line in record.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        innermost = stack.rpartition(";")[2]
        if innermost and not any(word in innermost for word in WAITING):
            yield stack, int(count)


def main(argv: Sequence[str] | None = None) -> None:
    """Profile a run and print one line per part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=workload.SIZES, default="3M")
    parser.add_argument("--lengths", choices=workload.NEW_TOKENS, default="equal")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    chosen = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="profile-"))
    workload.write(folder / "data", chosen.size)
    case, place = Grpo(lengths=chosen.lengths, dtype=chosen.dtype, size=chosen.size), folder / "run"
    with ThreadPoolExecutor() as threads:
        run = threads.submit(case.ours, folder / "data", place)
        while not (
            started := [
                p
                for p in psutil.Process().children()
                if "openrlhf.cli.train_ppo_ray" in p.cmdline()
            ]
        ):
            time.sleep(0.05)
        records = watch(place / "metrics.jsonl", started[0], folder)
        step = median(run.result().steps(WARM_UP + MEASURED)[-MEASURED:])
    seen = Counter[str]()
    for role, record in records.items():
        for stack, count in samples(record):
            part = next((name for name, word in PARTS if word in stack), f"{role}: rest")
            seen[part] += count
    total = sum(seen.values())
    for part, count in seen.most_common():
        print(f"{part:28}{step * count / total:8.2f} s{100 * count / total:7.1f} %")
    print(f"{'sum':28}{step:8.2f} s   per step; records: {folder}")


if __name__ == "__main__":
    main()
