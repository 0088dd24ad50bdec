"""Tests large libraries, each in a separate process.

A library may crash, hang, or change the environment of its process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from openrlhf.checks import Finding
from openrlhf.config.flags import UserError
from openrlhf.reporting import say

TIMEOUT_S = 120.0


@dataclass(eq=False)
class ProbeError(Exception):
    """A failed probe. `finding` names the library, its error and the fix."""

    finding: Finding


def probe(
    name: str, *arguments: str, of: str, fix: str, environment: Mapping[str, str] | None = None
) -> Any:
    """Run one of `PROBES` in a new process and return its result.

    Raises ProbeError with the library's name (`of`), the last line of its error, and `fix`.
    """
    command = [sys.executable, "-m", __name__, name, *arguments]
    env = os.environ | (environment or {})
    printed = ""
    try:
        done = subprocess.run(
            command, env=env, text=True, capture_output=True, check=True, timeout=TIMEOUT_S
        )
        printed = last_line(done.stdout)
        return json.loads(printed)
    except subprocess.CalledProcessError as failed:
        error = str(failed)  # includes the exit status, or the signal that killed the process
        if failed.returncode > 0:
            error = last_line(failed.stderr) or error
    except subprocess.TimeoutExpired as late:
        error = str(late)
    except json.JSONDecodeError:
        error = f"its process exited with status 0 and printed {printed!r} instead of a result"
    raise ProbeError(Finding(f"{of} does not work: {error}", fix, fails=True))


def last_line(text: str) -> str:
    """Return the last line that is not empty, or "" if there is none."""
    return text.strip().rpartition("\n")[2]


def torch_devices() -> tuple[str, list[tuple[str, int, int]]]:
    """Return torch's build, and each GPU's name, free memory and total memory in bytes.

    Computes a matrix product on each device, and runs a collective.
    """
    import torch
    from torch import distributed
    from torch.cuda import nccl

    build = f"torch {torch.__version__}"
    backend = "gloo"
    devices: list[tuple[str, int, int]] = []
    if torch.version.cuda and torch.cuda.device_count():
        torch.cuda.init()  # raises an error if the driver does not support this build
        nccl_version = ".".join(map(str, nccl.version()))
        build = f"{build}, CUDA {torch.version.cuda}, NCCL {nccl_version}"
        backend = "nccl"
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        assert torch.all(ones @ ones == 64), f"wrong matrix product on GPU {index}"
        devices.append((torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index)))
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    distributed.barrier()
    distributed.destroy_process_group()
    return build, devices


def vllm_platform() -> str:
    """Load vLLM's engine and kernels, and return the device type that vLLM was built for."""
    import torch
    from vllm.platforms import current_platform

    import_module("vllm.engine.arg_utils")
    current_platform.import_kernels()  # logs a failure but does not raise
    operators = [schema.name for schema in torch._C._jit_get_all_schemas()]
    assert any(name.startswith("_C") for name in operators), "its kernels cannot be loaded"
    return current_platform.device_type


def ray_resources() -> tuple[int, int] | None:
    """Join the running Ray cluster, if any, and return its numbers of machines and GPUs."""
    from openrlhf.cluster.ray_cluster import join_ray, machines

    gpus = join_ray()
    if gpus is None:
        return None
    return len(machines(gpus > 0)), gpus


PROBES: dict[str, Callable[..., Any]] = {
    "import": lambda module: str(import_module(module)),
    "torch": torch_devices,
    "vllm": vllm_platform,
    "ray": ray_resources,
}


if __name__ == "__main__":
    try:
        say(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
    except UserError as user_error:
        raise SystemExit(str(user_error)) from None
