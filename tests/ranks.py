"""A launcher that runs a test module as several processes."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_ranks(ranks: int, module: str, *arguments: str, timeout: float = 400) -> None:
    """Run `python -m module arguments…` as `ranks` processes in one process group.

    Raises an error with the output of all processes if one fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", module, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
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

    The process exits without finalizing the interpreter, because Gloo's threads may then abort it.
    """
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
