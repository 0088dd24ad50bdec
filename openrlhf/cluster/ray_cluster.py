"""A run's Ray cluster: an existing cluster that the run joins, or one that it starts."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter, services, worker
from ray._private.state import available_resources_per_node
from ray.exceptions import AuthenticationError

from openrlhf import termination
from openrlhf.cluster.placement import (
    CPU_PER_SLOT,
    NODE_ID,
    ROUNDING,
    Machine,
    Placement,
    PlacementError,
    Places,
)
from openrlhf.cluster.ray_watch import RayProcess, RayWatch
from openrlhf.config import machine
from openrlhf.config.flags import UserError

# Object store size if this package starts a Ray cluster without GPUs, where batches are small.
OBJECT_STORE_BYTES = 512 << 20
# Name prefixes of the resources that every node has. Any other resource identifies a kind of node.
COMMON_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory", "node:")
# Ray's parameters without the autoscaler and the log monitor, which are not used here.
LEAN_PARAMS = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)  # type: ignore[arg-type]
# Settings for a Ray cluster that this package starts.
OWN_RAY: dict[str, Any] = {
    # Prestarting spare workers takes seconds on a small machine.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # Metrics, which are not used here, cost a quarter of an idle Ray cluster's CPU time.
    "enable_metrics_collection": False,
    "event_stats": False,
    # Ray's default nice value of 15 would leave a run only the CPU time that nothing else uses.
    "worker_niceness": 0,
    # Task events, which are not used here, grow by several MiB per hundred steps.
    "task_events_report_interval_ms": 0,
}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
# A control store with external storage may be restarted.
# Ray ends its drivers 60 s after the store has died.
JOINED_PATIENCE_S = 40.0
RAYLET_TIMEOUT_S = 5.0
HEAD_TIMEOUT_S = 10.0
PRINT_OF_RAY: Callable[[Any, bool], None] = worker.print_to_stdstream
# An environment variable that marks all processes of a Ray cluster that this package starts.
# Each cluster has a different value.
STARTED_BY = "OPENRLHF_RAY_STARTED_BY"


@contextmanager
def ray_cluster(plan: Placement, on_loss: Callable[[RayProcess], None]) -> Iterator[None]:
    """Run the block in a Ray cluster.

    Join the cluster at RAY_ADDRESS, the Ray job's cluster, or the cluster that `ray start` has
    started on this machine; otherwise start a cluster that is shut down when the block exits.
    `on_loss` must end this process: a thread calls it if Ray's control store or this machine's
    raylet dies. Raises PlacementError if the cluster at RAY_ADDRESS cannot be joined, or if the
    cluster is too small for the plan.
    """
    was_connected = ray.is_initialized()
    with termination.exit_on_signals():
        session: str | None = None
        if join_ray() is None:
            session = _start_ray(plan)
        try:
            plan.check(machines(plan.on_gpus))
            with closing(_watch(on_loss, own=session is not None)):
                yield
        finally:
            if not was_connected:
                ray.shutdown()
            error = sys.exception()
            # Mistakes in flags, data and files are ValueErrors. Keep Ray's logs after other errors.
            is_mistake = isinstance(error, UserError) and isinstance(error, ValueError)
            if session and (error is None or is_mistake):
                shutil.rmtree(session, ignore_errors=True)


def _watch(on_loss: Callable[[RayProcess], None], *, own: bool) -> RayWatch:
    """Watch the control store and this machine's raylet."""
    context = ray.get_runtime_context()
    patience_s = 0.0 if own else JOINED_PATIENCE_S
    store = _host_and_port(context.gcs_address)
    processes = [
        RayProcess(name="control store (gcs_server)", address=store, own=own, patience_s=patience_s)
    ]
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            raylet = _raylet_address(node)
            processes.append(RayProcess(name="raylet on this machine", address=raylet, own=own))
    worker.print_to_stdstream = _print_unless_about_raylet  # type: ignore[assignment]
    return RayWatch(processes, on_loss)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _raylet_address(node: Mapping[str, Any]) -> tuple[str, int]:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _print_unless_about_raylet(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Print a message from Ray, unless it is the log of a dead raylet, which `on_loss` reports."""
    if "Raylet is terminated" not in "\n".join(data["lines"]):
        PRINT_OF_RAY(data, ignore_prefix)


def join_ray() -> int | None:
    """Join the running Ray cluster and return its number of GPUs, or None if there is no cluster.

    The process stays connected until it exits. Nothing is reserved. Raises PlacementError if the
    cluster cannot be joined.
    """
    # Make Ray keep CUDA_VISIBLE_DEVICES unchanged in actors without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not ray.is_initialized():
        address = _answering_address()
        if not address:
            return None
        try:
            # Do not use address="auto", which would also join another run's cluster.
            with termination.exit_on_signals():
                _init_ray(**QUIET)
        except (OSError, ValueError, AuthenticationError) as error:
            raise PlacementError(
                f"Ray at {address} cannot be joined: {error}. If Ray requires a token, set "
                "RAY_AUTH_MODE=token and write the head node's token to ~/.ray/auth_token."
            ) from error
    return int(ray.cluster_resources().get("GPU", 0))


def machines(on_gpus: bool, *, free: bool = False) -> list[Machine]:
    """Return the joined cluster's nodes, with their slots and resources.

    With `free`, only unused slots and resources are included. Nodes that do not answer are then
    skipped, because Ray takes half a minute to notice that a node is gone.
    """
    free_resources: Mapping[str, dict[str, float]] = {}
    if free:
        free_resources = available_resources_per_node()
    found: list[Machine] = []
    for node in ray.nodes():
        if not node["Alive"] or (free and not _answers(node)):
            continue
        resources: dict[str, float] = node["Resources"]
        if free:
            resources = free_resources.get(node["NodeID"], {})
        if on_gpus:
            slots = resources.get("GPU", 0.0)
        else:
            slots = resources.get("CPU", 0.0) / CPU_PER_SLOT
        other_resources: dict[str, float] = {}
        for name, amount in resources.items():
            if not name.startswith(COMMON_RESOURCES):
                other_resources[name] = amount
        labels = dict(node["Labels"])
        labels.pop(NODE_ID, None)
        found.append(
            Machine(
                name=node["NodeManagerAddress"],
                slots=int(slots + ROUNDING),
                resources=other_resources,
                labels=labels,
                id=node["NodeID"],
            )
        )
    return found


def _answers(node: Mapping[str, Any]) -> bool:
    try:
        socket.create_connection(_raylet_address(node), timeout=RAYLET_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def expected_machines(on_gpus: bool, declared: str | None) -> list[Machine]:
    """Return the machines that a run would have, without starting anything.

    The result contains the machines of the declared cluster, the machines of the joined Ray
    cluster, or this machine alone.
    """
    if declared:
        sizes = machine.declared_machines(declared)
        return [Machine(name=f"node {number}", slots=size) for number, size in enumerate(sizes)]
    if ray.is_initialized():
        return machines(on_gpus)
    slots = int(own_cores() / CPU_PER_SLOT)
    if on_gpus:
        slots = machine.count_gpus()
    return [Machine(name="this machine", slots=slots)]


def places_now(plan: Placement) -> Places:
    """Return the machine of every process, on slots that are free now if there are enough.

    If there are too few free slots, other processes must end before the plan's processes can start.
    """
    free_places = plan.places(machines(plan.on_gpus, free=True))
    return free_places or plan.check(machines(plan.on_gpus))


def _start_ray(plan: Placement) -> str:
    """Start a Ray cluster that ends with the run, and return its session folder."""
    services.ConsolePopen = _spawn  # type: ignore[assignment, misc]
    parameter.RayParams = LEAN_PARAMS  # type: ignore[assignment, misc]
    settings: dict[str, Any] = {}
    for name, value in OWN_RAY.items():
        if f"RAY_{name}" not in os.environ:
            settings[name] = value
    _Started.mark = f"{os.getpid()}-{time.time_ns()}"
    os.environ[STARTED_BY] = _Started.mark
    try:
        context = _init_ray(
            "local",
            num_cpus=own_cores(),
            include_dashboard=False,
            object_store_memory=None if plan.on_gpus else OBJECT_STORE_BYTES,
            _system_config=settings,
            **QUIET,
        )
    except Exception as error:  # Ray does not raise a more specific class
        raise PlacementError(
            f"Ray did not start on this machine: {error} If the machine is busy, try again."
        ) from error
    return str(context.address_info["session_dir"])  # type: ignore[attr-defined]


def _init_ray(*args: Any, **options: Any) -> Any:
    """Call `ray.init` in a thread. If asked to terminate in the meantime, kill Ray and exit.

    In the main thread, `ray.init` would replace the SIGTERM handler, and notice the signal only
    after half a minute.
    """
    # Outside the main thread, Ray would warn that it cannot set a signal handler.
    logging.getLogger(worker.__name__).setLevel(logging.ERROR)
    result = Future[Any]()

    def init() -> None:
        try:
            result.set_result(ray.init(*args, **options))
        except BaseException as error:
            result.set_exception(error)
        # Keep this thread alive: if it ended, Linux would kill the Ray processes it started.
        threading.Event().wait()

    threading.Thread(target=init, name="ray-init", daemon=True).start()
    try:
        context = result.result()
    except (SystemExit, KeyboardInterrupt):
        if termination.asked():
            _Started.spawning.acquire()  # never released, so that no more processes can start
            kill_started_ray()
            termination.end_at_once()
        raise
    if threading.current_thread() is threading.main_thread():
        # Restore the handlers: Ray has installed a C handler that dumps a stack trace.
        for number in termination.ENDINGS:
            signal.signal(number, signal.getsignal(number))
    return context


class _Started:
    """State of the Ray cluster that this process has started."""

    spawning = threading.Lock()
    mark = ""  # value of STARTED_BY; the environment may hold the value for a parent's cluster


def _spawn(*args: Any, **options: Any) -> "subprocess.Popen[Any]":
    """Start a Ray process in its own process group.

    Schedulers and `timeout` send SIGTERM to the run's process group, and Ray must outlive the run.
    """
    with _Started.spawning:
        return subprocess.Popen(*args, process_group=0, **options)


def kill_started_ray() -> bool:
    """Kill all Ray processes that this process has started.

    Return False if it has started no Ray processes.
    """
    if not _Started.mark:
        return False
    mark = f"{STARTED_BY}={_Started.mark}".encode()
    killed = False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with suppress(OSError):  # the process has exited or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed = True
    return killed


def own_cores() -> int:
    """Return the number of CPUs of a Ray cluster that this package starts."""
    return max(os.cpu_count() or 1, 4)


def _answering_address() -> str | None:
    """Return the address in RAY_ADDRESS, or the address that `ray start` wrote on this machine.

    Return None if there is no such address. The file written by `ray start` outlives its cluster,
    and `ray.init` would wait minutes for a dead cluster, so an address from the file is ignored if
    nothing answers there. Raises PlacementError if nothing answers at RAY_ADDRESS.
    """
    requested = os.environ.get("RAY_ADDRESS")
    try:
        # No public function returns the address without connecting.
        address = services.get_ray_address_from_environment(None, None)  # type: ignore[arg-type]
        if address in (None, "local"):
            return None
        if "://" not in address:
            socket.create_connection(_host_and_port(address), timeout=HEAD_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        if requested:
            raise PlacementError(
                f"No Ray cluster answers at RAY_ADDRESS {requested} ({error}). Start one with "
                "`ray start --head`, or unset RAY_ADDRESS to let the run start its own Ray."
            ) from error
        return None
    return address
