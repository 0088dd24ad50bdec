"""The memory plan that a run shows at its start and in a dry run.

This module imports no heavy library.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from openrlhf.checks import Finding
from openrlhf.config import machine
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.files import disk_of, existing_part, file_system
from openrlhf.planning import advice, table
from openrlhf.planning.cluster import Cluster, parse_cluster
from openrlhf.planning.plan import Plan, make_plan
from openrlhf.planning.shapes import PlanError, SplitError
from openrlhf.planning.usage import gib


def this_machine() -> Cluster:
    """Describe this machine as a cluster: its GPUs or, without GPUs, its free memory.

    Raises PlanError if the memory of the GPUs cannot be read.
    """
    processes = machine.world_size()
    if not machine.count_gpus():
        return Cluster(per_node=processes, device_bytes=machine.free_memory(), on_gpus=False)
    size = machine.gpu_memory()
    if size is None:
        raise PlanError("nvidia-smi does not report the memory of the GPUs: pass --cluster.")
    return Cluster(per_node=machine.count_gpus(), device_bytes=size)


def plan_of_run(config: Any, declared: str | None = None) -> Plan | None:
    """Return the plan of a run that is starting, or None if its model or devices are unknown.

    If `declared` is set, the plan is for that cluster instead of this machine. Raises SplitError if
    the ranks of the models or engines cannot share the attention heads.
    """
    try:
        if declared:
            cluster = parse_cluster(declared)
        else:
            cluster = this_machine()
        if isinstance(config, SupervisedConfig):  # one process per device, started by a launcher
            here = machine.local_world_size()
            cluster = replace(cluster, nodes=machine.world_size() // here, per_node=here)
        return make_plan(config, cluster)
    except SplitError:
        raise
    except PlanError:
        return None


def plan_lines(plan: Plan | None) -> list[str]:
    """Return the lines of a plan's table, or no lines if there is no plan."""
    if plan is None:
        return []
    return table.lines(plan)


def memory_findings(config: Any, plan: Plan | None) -> list[Finding]:
    """If the run is not expected to fit, return a warning that lists the nearest settings that fit.

    The finding is a failure only if the weights alone do not fit.
    """
    if plan is None or plan.fits or plan.shortage:
        return []
    nearest = advice.nearest_fit(config, plan.cluster, thorough=False)
    fix = " ".join(advised(config, plan.cluster, nearest))
    return [Finding(table.summary(plan), fix, fails=not plan.holds_weights)]


def drive_findings(ds: DeepSpeedConfig, plan: Plan | None) -> list[Finding]:
    """Check that the folder for offloaded state is writable, on a drive, and large enough.

    The findings are failures unless the run joined a Ray cluster, whose machines may have other
    drives than this one.
    """
    if ds.nvme_path is None:
        return []
    fails = machine.cluster_gpus is None
    flag = f"--ds.nvme_path {ds.nvme_path}"
    folder = existing_part(Path(ds.nvme_path))
    other = "Use a folder on an NVMe drive of every machine."
    try:
        with TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 1)
    except OSError as error:
        return [Finding(f"{flag}: no file can be created there ({error}).", other, fails=fails)]
    kind = file_system(folder)
    if kind in ("tmpfs", "ramfs"):
        seen = f"{flag} is in memory ({kind}), so offloading to it frees no memory."
        return [Finding(seen, f"{other} Or use --ds.adam_offload instead.", fails=fails)]
    needed = plan.drive_bytes if plan else 0
    free = disk_of(folder).free
    if needed <= free:
        return []
    seen = (
        f"{flag} has {gib(free)} of free space, but the offloaded state takes up to {gib(needed)} "
        "per machine: 20 bytes per trained weight with Adam, and the weights with "
        "--ds.param_offload nvme."
    )
    return [Finding(seen, "Free some space, or use a larger drive or more machines.", fails=fails)]


def advised(config: Any, cluster: Cluster, nearest: advice.Advice | None) -> Iterator[str]:
    """Yield sentences that describe the nearest settings with which the run fits."""
    if nearest is None:
        yield (
            "No setting fits on this cluster: use a smaller model, a lower --data.max_len, or more "
            "or larger devices."
        )
        return
    plan = nearest.plan
    pool = plan.tightest
    peak = pool.total(pool.peak)
    yield f"The run fits with {nearest.typed(config)}"
    yield f"(peak {gib(peak)} of {gib(pool.capacity)} in {pool.peak})."
    if plan.drive_bytes:
        yield f"{_drive_needs(plan)} These settings are slow."
    if not plan.host_bytes:
        return
    yield f"These settings need {gib(plan.host_bytes)} of CPU memory per machine."
    drive = advice.on_drive(config, cluster, nearest)
    if drive:
        yield (
            "If a machine has less, keep the state on an NVMe drive, which is slower: "
            f"{drive.typed(config)}. {_drive_needs(drive.plan)}"
        )


def _drive_needs(plan: Plan) -> str:
    """Return a sentence about the drive and the CPU memory that a plan needs."""
    needs = f"{gib(plan.drive_bytes)} of space on a drive"
    if plan.host_bytes:
        needs += f" and {gib(plan.host_bytes)} of CPU memory"
    return f"These settings need {needs} per machine; replace {advice.DRIVE} with your folder."
