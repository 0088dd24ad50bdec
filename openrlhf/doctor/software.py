"""Checks of torch, vLLM, DeepSpeed, Ray and optional packages, each in a separate process."""

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from openrlhf.checks import Finding
from openrlhf.config import machine
from openrlhf.doctor.packages import vllm_versions
from openrlhf.doctor.probes import probe
from openrlhf.doctor.verdict import verdict
from openrlhf.rollout.engine_settings import engine_device, engine_environment
from openrlhf.units import GIB

FREE_FRACTION = 0.9  # with less free memory, a GPU is reported as used by other processes
STACK = "Install versions of torch and vLLM that docs/gpu.md lists."
# Optional packages, each with the module to import and the flags that need it.
OPTIONAL = {
    "flash-attn": ("flash_attn", "--ds.attn_implementation flash_attention_2"),
    "bitsandbytes": ("bitsandbytes", "--ds.load_in_4bit or --optim adam_8bit"),
    "wandb": ("wandb", "--logger.wandb.key"),
}


def torch() -> Iterator[Finding]:
    """Check torch, CUDA, NCCL, the driver and each GPU."""
    gpus = machine.count_gpus()
    driver = nvidia_driver()
    fix = f"{STACK} The driver must support the CUDA version of torch and vLLM."
    build, devices = probe("torch", of="torch", fix=fix)
    if driver:
        build += f", driver {driver}"
    problem = f" does not use the {gpus} GPUs of this machine."
    yield verdict(gpus <= len(devices), build, problem, fix, fails=True)
    for name, free, total in devices:
        seen = f"{name}: {free / GIB:.0f} of {total / GIB:.0f} GiB are free"
        problem = "; other processes use the rest."
        fix = "End these processes (see nvidia-smi), or choose GPUs with CUDA_VISIBLE_DEVICES."
        yield verdict(free >= FREE_FRACTION * total, seen, problem, fix)


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if there are no GPUs."""
    if not machine.installed_gpus():
        return None
    return subprocess.getoutput(
        "timeout 20 nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader"
    )


def vllm() -> Iterator[Finding]:
    """Check the version of vLLM, and load its engine and kernels."""
    yield from vllm_versions()
    package = machine.installed("vllm")
    if package:
        device = engine_device()
        built_for = probe("vllm", of="vllm", fix=STACK, environment=engine_environment(device))
        seen = f"{package.name} {package.version}, built for {built_for}"
        problem = f", but this machine needs a build for {device}."
        yield verdict(built_for == device, seen, problem, STACK, fails=True)


def deepspeed() -> Iterator[Finding]:
    """Import DeepSpeed, and look for a compiler for its CPU AdamW and for GPU kernels."""
    package = machine.installed("deepspeed")
    if package:  # `packages.requirements` reports a missing DeepSpeed
        yield from library(package, "deepspeed", "Reinstall DeepSpeed.")
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield verdict(
        bool(shutil.which("g++") and shutil.which("ninja") and header.exists()),
        "Compiler for DeepSpeed's AdamW on CPUs and for GPU kernels",
        f": g++, ninja or {header} is missing, so --ds.adam_offload uses torch's slower AdamW.",
        "Install the packages g++, ninja-build and python3-dev.",
    )


def library(package: Distribution, module: str, fix: str) -> Iterator[Finding]:
    """Import `module` of an installed package."""
    seen = f"{package.name} {package.version}"
    probe("import", module, of=seen, fix=fix)
    yield Finding(seen, passes=True)


def optional(name: str) -> Iterator[Finding]:
    """Import an optional package if it is installed."""
    module, flags = OPTIONAL[name]
    only = f"; it is needed only for {flags}"
    package = machine.installed(name)
    if package is None:
        yield Finding(f"{name} is not installed{only}", passes=True)
        return
    yield from library(
        package, module, f"Reinstall it for this torch version, or uninstall it{only}."
    )


def ray() -> Iterator[Finding]:
    """Check that the running Ray cluster, if any, can be joined."""
    fix = "`ray status` shows the state of the cluster."
    cluster = probe("ray", of="Ray", fix=fix)
    if cluster is None:
        yield Finding("Ray: no cluster is running, so a run starts its own", passes=True)
        return
    nodes, gpus = cluster
    installed = machine.installed_gpus()
    seen = f"Ray: a cluster with {nodes} machines and {gpus} GPUs is running"
    problem = f", but this machine has {installed} GPUs."
    fix = f"Restart Ray with --num-gpus {installed}."
    yield verdict(gpus > 0 or not installed, seen, problem, fix, fails=True)
