"""The memory plan of a run: shown by a dry run and at the start.

This module imports no heavy library.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from openrlhf.checks import Finding
from openrlhf.config import machine
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.planning import advice, table
from openrlhf.planning.cluster import Cluster, parse_cluster
from openrlhf.planning.plan import Plan, make_plan
from openrlhf.planning.shapes import PlanError
from openrlhf.planning.usage import gib


def this_machine() -> Cluster:
    """Return this machine as a cluster: its GPUs, or the memory that its processes may use.

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
    """Return the plan of a run that starts, or None if its model or devices are not known.

    `declared` is a cluster to plan for instead of this machine.
    """
    try:
        if declared:
            cluster = parse_cluster(declared)
        else:
            cluster = this_machine()
        if isinstance(config, SupervisedConfig):  # one process per device, started by a launcher
            cluster = replace(cluster, per_node=machine.world_size())
        return make_plan(config, cluster)
    except PlanError:
        return None


def plan_lines(plan: Plan | None) -> list[str]:
    """Return the table of a plan, or no lines without a plan."""
    if plan is None:
        return []
    return table.lines(plan)


def memory_findings(config: Any, plan: Plan | None) -> list[Finding]:
    """Return a warning if the run is not expected to fit, with the nearest settings that do.

    It fails only if the weights alone do not fit.
    """
    if plan is None or plan.fits or plan.shortage:
        return []
    fix = " ".join(advised(config, advice.nearest_fit(config, plan.cluster, thorough=False)))
    return [Finding(table.summary(plan), fix, fails=not plan.holds_weights)]


def advised(config: Any, nearest: advice.Advice | None) -> Iterator[str]:
    """Yield the sentences that name the nearest settings that fit."""
    if nearest is None:
        yield "No setting fits on this cluster: use a smaller model, or more or larger devices."
        return
    pool = nearest.plan.tightest
    peak = pool.total(pool.peak)
    yield f"It fits with {nearest.typed(config)}"
    yield f"(peak {gib(peak)} of {gib(pool.capacity)} in {pool.peak})."
    if pool.host_bytes:
        yield f"This needs {gib(pool.host_bytes)} of CPU memory per machine."
