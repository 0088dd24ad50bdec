"""The Ray cluster of a run: a running cluster that the run joins, or a new one for the run."""

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray._private import parameter, services
from ray._private.state import available_resources_per_node
from ray.exceptions import AuthenticationError

from openrlhf import termination
from openrlhf.config import machine
from openrlhf.config.flags import UserError
from openrlhf.distributed.placement import CPU_PER_SLOT, NODE_ID, Machine, Placement, PlacementError, Places

# Bytes, for a Ray that we start on a machine without GPUs: batches are flat and small.
OBJECT_STORE_BYTES = 512 << 20
OF_EVERY_NODE = ("CPU", "GPU", "memory", "object_store_memory", "node:")  # resources that say nothing of their kind
LEAN = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)  # type: ignore[arg-type]
# Spare workers cost seconds of a small machine; statistics that nobody reads cost a quarter of Ray's CPU time at rest.
IDLE_WORK = ("enable_worker_prestart", "prestart_worker_first_driver", "enable_metrics_collection", "event_stats")
# A nice value of 15 leaves a run what other programs of a shared machine do not want. Ray's record of all tasks, which
# nobody reads here, grows by several MiB per hundred steps.
OWN_RAY: dict[str, Any] = dict.fromkeys(IDLE_WORK, False) | {"worker_niceness": 0, "task_events_report_interval_ms": 0}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextmanager
def ray_cluster(plan: Placement) -> Iterator[None]:
    """Join the Ray of RAY_ADDRESS, of the job, or of `ray start` on this machine; otherwise start a Ray for the run.

    Raises PlacementError if the Ray of RAY_ADDRESS cannot be joined, or if the cluster is too small for the plan.
    """
    started = not ray.is_initialized()
    session = _start_ray(plan) if join_ray() is None else None
    with termination.in_order():
        try:
            plan.check(machines(plan.on_gpus))
            yield
        finally:
            if started:
                ray.shutdown()
            error = sys.exception()
            # Ray's logs stay after an error, but not after a mistake in flags, data or files, which is a ValueError.
            if session and (not error or (isinstance(error, UserError) and isinstance(error, ValueError))):
                shutil.rmtree(session, ignore_errors=True)


def join_ray() -> int | None:
    """Join the running Ray, unless this process has joined one. Returns its number of GPUs, or None if none is running.

    Nothing is reserved. The process leaves Ray when it ends. Raises PlacementError if Ray cannot be joined.
    """
    # Ray leaves CUDA_VISIBLE_DEVICES of actors without GPUs as it is.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not ray.is_initialized():
        if not (address := _answering_address()):
            return None
        try:  # Without address="auto", which also joins a Ray that another run has started, and dies with it.
            ray.init(**QUIET)
        except (OSError, ValueError, AuthenticationError) as error:
            raise PlacementError(
                f"Ray at {address} cannot be joined: {error}. If Ray asks for a token, set RAY_AUTH_MODE=token and write "
                "the token of the head node to ~/.ray/auth_token."
            ) from error
    return int(ray.cluster_resources().get("GPU", 0))


def machines(on_gpus: bool, *, free: bool = False) -> list[Machine]:
    """The nodes of the cluster that has been joined, with all their slots and resources, or with the free ones.

    Nodes with something free have answered just now: Ray takes half a minute to see that a node is gone.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and (not free or _answers(node))]
    left = available_resources_per_node() if free else {node["NodeID"]: node["Resources"] for node in nodes}
    found: list[Machine] = []
    for node in nodes:
        there: dict[str, float] = left.get(node["NodeID"], {})
        slots = there.get("GPU", 0.0) if on_gpus else there.get("CPU", 0.0) / CPU_PER_SLOT
        found.append(
            Machine(
                name=node["NodeManagerAddress"],
                slots=int(slots + 1e-6),
                resources={name: there[name] for name in there if not name.startswith(OF_EVERY_NODE)},
                labels={name: label for name, label in node["Labels"].items() if name != NODE_ID},
                id=node["NodeID"],
            )
        )
    return found


def _answers(node: dict[str, Any]) -> bool:
    with suppress(OSError), socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=5):
        return True
    return False


def expected_machines(on_gpus: bool, declared: str | None) -> list[Machine]:
    """The machines of a run that starts nothing: of a declared cluster, of the joined Ray, or this one."""
    if declared:
        sizes = machine.declared_machines(declared)
        return [Machine(name=f"node {number}", slots=size) for number, size in enumerate(sizes)]
    if ray.is_initialized():
        return machines(on_gpus)
    return [Machine(name="this machine", slots=machine.count_gpus() if on_gpus else int(own_cores() / CPU_PER_SLOT))]


def places_now(plan: Placement) -> Places:
    """The machine of every process: free ones if there are enough, otherwise machines on which others must end first."""
    return plan.places(machines(plan.on_gpus, free=True)) or plan.check(machines(plan.on_gpus))


def _start_ray(plan: Placement) -> str:
    """Start a Ray that ends with the run. Returns its session folder."""
    # Schedulers and `timeout` send SIGTERM to the process group. In that group Ray would end before the run has.
    services.ConsolePopen = partial(subprocess.Popen, process_group=0)  # type: ignore[assignment, misc]
    chosen = {name: value for name, value in OWN_RAY.items() if f"RAY_{name}" not in os.environ}
    # The autoscaler and the reader of logs have nothing to do here.
    parameter.RayParams = LEAN  # type: ignore[assignment, misc]
    try:
        context = ray.init(
            "local",
            num_cpus=own_cores(),
            include_dashboard=False,
            object_store_memory=None if plan.on_gpus else OBJECT_STORE_BYTES,
            _system_config=chosen,
            **QUIET,
        )
    except Exception as error:  # Ray raises no narrower class
        raise PlacementError(f"Ray did not start here: {error} If the machine is busy, try again.") from error
    return str(context.address_info["session_dir"])  # type: ignore[attr-defined]


def own_cores() -> int:
    """The CPUs of a Ray that we start."""
    return max(os.cpu_count() or 1, 4)


def _answering_address() -> str | None:
    """The address in RAY_ADDRESS, or the address that `ray start` noted on this machine; None if there is neither.

    The note of `ray start` outlives its cluster, and `ray.init` would wait for that cluster for minutes. So a noted
    address that does not answer is ignored. Raises PlacementError if nothing answers at RAY_ADDRESS.
    """
    asked = os.environ.get("RAY_ADDRESS")
    try:
        # no public call gives the address without connecting
        address = services.get_ray_address_from_environment(None, None)  # type: ignore[arg-type]
        if address in (None, "local"):
            return None
        if "://" not in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        if asked:
            raise PlacementError(
                f"No Ray answers at RAY_ADDRESS {asked} ({error}). Start it with `ray start --head`, or unset "
                "RAY_ADDRESS to let the run start one for itself."
            ) from error
        return None
    return address
