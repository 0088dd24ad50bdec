"""The device kind of this process, and the environment variables to set before torch and DeepSpeed
are imported.
"""

import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from openrlhf.config.machine import cluster_settings

OWN_PORTS = range(20_000, 32_768)


def device_kind() -> str:
    """`cuda` if torch sees a GPU, otherwise `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_port() -> int:
    """A TCP port of this machine that is free now.

    The kernel and Ray give no port of this range to other sockets, because the port is bound
    seconds later.
    """
    for port in random.SystemRandom().sample(OWN_PORTS, len(OWN_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no TCP port of {OWN_PORTS.start} to {OWN_PORTS.stop - 1} is free")


def worker_environment(kind: str, *, threads: int) -> dict[str, str]:
    """Environment variables of a training process, to be set before torch and DeepSpeed are
    imported.

    `threads`: OpenMP threads of the process. Idle OpenMP threads must sleep, because spinning
    threads take the cores of the engine.
    """
    common = {
        "NCCL_DEBUG": "WARN",
        **cluster_settings(),
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),  # Ray's own choice is 1
    }
    # A node may have GPUs that are not Ray's.
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "passive"}
    return common if kind == "cuda" else common | on_cpu


@contextmanager
def silenced_stderr() -> Iterator[None]:
    """Within it, standard error of C code and child processes is dropped. Exceptions are raised as
    usual.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def redirect_output(path: str) -> None:
    """Send standard output and error of this process to a file, including the output of C++ code."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def note(what: str) -> None:
    """Print a line with the time into the log of this process."""
    print(f"{time.time():.3f} {what}", flush=True)


def complete_launcher_environment() -> None:
    """Set the variables that a launcher would have set, so that one plain process is a world of
    one.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(free_port())
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
