"""A launcher that runs a test module as several processes."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def unused_port() -> int:
    """Return a TCP port of this machine that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets for one of `ranks` processes on this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def fork_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments)` in `ranks` forked processes, and wait for them.

    The processes start with all modules that the calling process has imported. The calling process
    must not have started any threads.
    """
    port = unused_port()
    forked = multiprocessing.get_context("fork")
    processes = []
    for rank in range(ranks):
        process = forked.Process(target=_work_as_rank, args=(rank, ranks, port, work, arguments))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()


def _work_as_rank(
    rank: int, ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= rank_environment(rank, ranks, port)
    work(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(ranks: int, module: str, *arguments: str, timeout: float = 400) -> None:
    """Run `python -m module arguments…` as `ranks` processes in one process group.

    Raises an error with the output of all processes if one fails.
    """
    port = unused_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", module, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | rank_environment(rank, ranks, port) | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            raise AssertionError(
                f"rank {rank} of {module} ended with {process.returncode}:\n{output}"
            )


def main() -> None:
    """Run the test module's `main` as one of the launched processes.

    The process skips interpreter finalization, because Gloo's threads might abort the process then.
    """
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
