"""Machine-level settings of a training process: device type, ports, environment, output."""

import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from openrlhf.config.machine import cluster_settings, kernel_caches
from openrlhf.reporting import say

OWN_PORTS = range(20_000, 32_768)  # outside Linux's ephemeral ports and Ray's worker ports


def device_kind() -> str:
    """Return `cuda` if torch finds a GPU, otherwise `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def free_port() -> int:
    """Return a free TCP port from `OWN_PORTS`. Raises OSError if no port is free.

    The caller binds the port seconds later, so the port comes from a range that neither the kernel
    nor Ray assigns from.
    """
    for port in random.SystemRandom().sample(OWN_PORTS, len(OWN_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no TCP port from {OWN_PORTS.start} to {OWN_PORTS.stop - 1} is free")


def worker_environment(kind: str, *, threads: int) -> dict[str, str]:
    """Return the environment variables for a training process.

    The variables must be set before torch and DeepSpeed are imported. `threads` is the number of
    OpenMP threads.
    """
    environment = {
        "NCCL_DEBUG": "WARN",
        **cluster_settings(),
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),  # Ray would otherwise set OMP_NUM_THREADS to 1
    }
    if kind != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # hide any GPUs that Ray does not manage
        environment["DS_ACCELERATOR"] = "cpu"
        # Let idle OpenMP threads sleep: spinning threads would use up the engine's cores.
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment


@contextmanager
def silenced_stderr() -> Iterator[None]:
    """Discard standard error, even from C code and child processes, until the block exits."""
    sys.stderr.flush()
    original = os.dup(2)
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


def redirect_output(path: str) -> None:
    """Redirect this process's stdout and stderr, including C++ output, to the end of a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def note(event: str) -> None:
    """Write a line with the Unix time in seconds to this process's log."""
    say(f"{time.time():.3f} {event}")


def complete_launcher_environment() -> None:
    """Set the variables that a launcher would set.

    Without a launcher, the world size is 1. The caches of compiled kernels are also bounded.
    """
    os.environ.update(kernel_caches())
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(free_port())
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
