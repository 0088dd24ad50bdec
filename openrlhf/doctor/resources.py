"""Checks of memory, disks, limits, the sandbox for generated programs, and the Hub."""

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from openrlhf.checks import Finding
from openrlhf.config import machine
from openrlhf.doctor.verdict import verdict
from openrlhf.files import disk_of, existing_part
from openrlhf.isolation.sandbox import SandboxError, missing_protection
from openrlhf.units import GIB

MEMORY_GIB = 4  # enough for an engine and a training process with a tiny model
SHM = Path("/dev/shm")
OBJECT_STORE_GIB = 0.5  # size of Ray's object store on a machine without GPUs
SHM_GIB_PER_GPU = 1  # for the buffers of NCCL and Ray
DISK_GIB = 10
# The limits that Ray needs, each with a description, its ulimit option and the minimum.
LIMITS = {
    resource.RLIMIT_NOFILE: ("open files", "-n", 8192),
    resource.RLIMIT_NPROC: ("processes and threads", "-u", 4096),
}
HUB_TIMEOUT_S = 10.0


def memory() -> list[Finding]:
    """Check the free memory within the limits of the container, and count the CPU cores."""
    free = machine.free_memory() / GIB
    return [
        verdict(
            free >= MEMORY_GIB,
            f"{machine.usable_cores()} CPU cores, {free:.1f} GiB of free memory",
            f"; the smallest run needs {MEMORY_GIB} GiB.",
            "End other processes, or raise the container's memory limit (docker run --memory).",
        )
    ]


def shared_memory() -> list[Finding]:
    """Check the size of the shared memory, which Ray and NCCL use."""
    needed = max(OBJECT_STORE_GIB, SHM_GIB_PER_GPU * machine.count_gpus())
    problem = f", but Ray and NCCL need {needed:g} GiB."
    if not SHM.is_dir():
        fix = f"Mount it: mount -t tmpfs tmpfs {SHM}"
        return [Finding(f"{SHM} does not exist{problem}", fix, fails=True)]
    shared = disk_of(SHM).free / GIB
    seen = f"{SHM}: {shared:.2f} GiB are free"
    fix = "Increase its size (docker run --shm-size 16g or --ipc=host), or remove leftover files."
    return [verdict(shared >= needed, seen, problem, fix, fails=True)]


def disks() -> Iterator[Finding]:
    """Check free space and permissions of the folders for downloads, runs and temporary files."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folders = {
        "downloads (HF_HOME)": os.environ.get("HF_HOME", f"{cache}/huggingface"),
        "runs (--run.dir)": "runs",
        "temporary files (TMPDIR)": tempfile.gettempdir(),
    }
    for purpose, name in folders.items():
        folder = Path(name).expanduser().absolute()
        existing = existing_part(folder)
        free = disk_of(existing).free / GIB
        seen = f"{free:.0f} GiB for {purpose} in {folder}"
        problem = f": {existing} is not writable or has less than {DISK_GIB} GiB of free space."
        fix = "Change the folder's permissions, free some space, or choose another folder."
        yield verdict(free >= DISK_GIB and os.access(existing, os.W_OK), seen, problem, fix)


def limits() -> Iterator[Finding]:
    """Check the limits on open files and processes."""
    for kind, (name, option, needed) in LIMITS.items():
        _, limit = resource.getrlimit(kind)
        if limit == resource.RLIM_INFINITY:
            yield Finding(f"Limit on {name}: none", passes=True)
            continue
        seen = f"Limit on {name}: {limit}"
        fix = f"Raise the limit: ulimit {option} {needed}, or in /etc/security/limits.conf."
        yield verdict(limit >= needed, seen, f"; Ray needs up to {needed}.", fix)


def sandbox() -> Iterator[Finding]:
    """Run a program in the sandbox for generated programs, and report missing protections."""
    try:
        gaps = missing_protection()
    except (SandboxError, OSError) as error:
        gaps = [str(error)]
    yield verdict(
        not gaps,
        "Sandbox for generated programs",
        f": {'; '.join(gaps)}.",
        "Use a kernel with Landlock and seccomp, or avoid --reward.verifier code.",
    )


def hub() -> Iterator[Finding]:
    """Check that the Hugging Face Hub, or the mirror in HF_ENDPOINT, can be reached."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield Finding("HF_HUB_OFFLINE is set: only downloaded files are used", passes=True)
        return
    error = ""
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as failed:
        error = str(failed)
    yield verdict(
        not error,
        constants.ENDPOINT,
        f" cannot be reached ({error}).",
        "Set HTTPS_PROXY to a proxy or HF_ENDPOINT to a mirror. Without a network, pass folders "
        "instead of Hub names, and set HF_HUB_OFFLINE=1.",
    )
