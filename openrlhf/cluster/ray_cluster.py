"""The Ray cluster of a run: a running cluster that the run joins, or a new one for the run."""

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
from contextlib import closing, contextmanager, nullcontext, suppress
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
    Machine,
    Placement,
    PlacementError,
    Places,
)
from openrlhf.cluster.ray_watch import LostRay, RayProcess, RayWatch
from openrlhf.config import machine
from openrlhf.config.flags import UserError

# Bytes, for a Ray that we start on a machine without GPUs: batches are flat and small.
OBJECT_STORE_BYTES = 512 << 20
OF_EVERY_NODE = (
    "CPU",
    "GPU",
    "memory",
    "object_store_memory",
    "node:",
)  # resources that say nothing of their kind
LEAN = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)  # type: ignore[arg-type]
# Spare workers cost seconds of a small machine; statistics that nobody reads cost a quarter of
# Ray's CPU time at rest.
IDLE_WORK = (
    "enable_worker_prestart",
    "prestart_worker_first_driver",
    "enable_metrics_collection",
    "event_stats",
)
# At Ray's nice value of 15, a run only gets the CPU time that other programs of a shared machine
# leave. Ray's record of all tasks, which is not used here, grows by several MiB per hundred steps.
OWN_RAY: dict[str, Any] = dict.fromkeys(IDLE_WORK, False) | {
    "worker_niceness": 0,
    "task_events_report_interval_ms": 0,
}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
# A control store that keeps its state elsewhere may start again. Ray ends its drivers 60 s after
# its death.
JOINED_PATIENCE_S = 40.0
PRINT_OF_RAY: Callable[[Any, bool], None] = worker.print_to_stdstream
STARTED_BY = "OPENRLHF_RAY_STARTED_BY"  # a variable of all processes of a Ray that we start, with a value of its own


@contextmanager
def ray_cluster(
    plan: Placement, on_loss: Callable[[LostRay], None] | None = None
) -> Iterator[None]:
    """Join the Ray of RAY_ADDRESS, of the job, or of `ray start` on this machine; otherwise start a
    Ray for the run.

    `on_loss` ends this process. It is called in a thread if Ray's control store, or its raylet on
    this machine, dies. Raises PlacementError if the Ray of RAY_ADDRESS cannot be joined, or if the
    cluster is too small for the plan.
    """
    started = not ray.is_initialized()
    with termination.in_order():
        session = _start_ray(plan) if join_ray() is None else None
        try:
            plan.check(machines(plan.on_gpus))
            with closing(_watch(on_loss, own=session is not None)) if on_loss else nullcontext():
                yield
        finally:
            if started:
                ray.shutdown()
            error = sys.exception()
            # Ray's logs stay after an error, but not after a mistake in flags, data or files, which
            # is a ValueError.
            if session and (
                not error or (isinstance(error, UserError) and isinstance(error, ValueError))
            ):
                shutil.rmtree(session, ignore_errors=True)


def _watch(on_loss: Callable[[LostRay], None], *, own: bool) -> RayWatch:
    """Watch the control store, and the raylet of this machine."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    patience_s = 0.0 if own else JOINED_PATIENCE_S
    store = (host.strip("[]"), int(port))
    processes = [
        RayProcess(name="control store (gcs_server)", address=store, own=own, patience_s=patience_s)
    ]
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            daemon = (node["NodeManagerAddress"], node["NodeManagerPort"])
            processes.append(RayProcess(name="raylet on this machine", address=daemon, own=own))

    worker.print_to_stdstream = _print_unless_of_raylet  # type: ignore[assignment]
    return RayWatch(processes, on_loss)


def _print_unless_of_raylet(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Print Ray's messages, except for the end of the log of a dead raylet: `on_loss` reports the
    death.
    """
    if not any("Raylet is terminated" in line for line in data["lines"]):
        PRINT_OF_RAY(data, ignore_prefix)


def join_ray() -> int | None:
    """Join the running Ray, unless this process has joined one. Returns its number of GPUs, or None
    if none is running.

    Nothing is reserved. The process leaves Ray when it ends. Raises PlacementError if Ray cannot be
    joined.
    """
    # Ray leaves CUDA_VISIBLE_DEVICES of actors without GPUs as it is.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not ray.is_initialized():
        if not (address := _answering_address()):
            return None
        try:  # Without address="auto", which also joins a Ray that another run has started, and dies with it.
            with termination.in_order():
                _init_ray(**QUIET)
        except (OSError, ValueError, AuthenticationError) as error:
            raise PlacementError(
                f"Ray at {address} cannot be joined: {error}. If Ray asks for a token, set RAY_AUTH_MODE=token and write "
                "the token of the head node to ~/.ray/auth_token."
            ) from error
    return int(ray.cluster_resources().get("GPU", 0))


def machines(on_gpus: bool, *, free: bool = False) -> list[Machine]:
    """The nodes of the cluster that has been joined, with all their slots and resources, or with
    the free ones.

    Nodes with something free have answered just now: Ray takes half a minute to see that a node is
    gone.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and (not free or _answers(node))]
    left = (
        available_resources_per_node()
        if free
        else {node["NodeID"]: node["Resources"] for node in nodes}
    )
    found: list[Machine] = []
    for node in nodes:
        there: dict[str, float] = left.get(node["NodeID"], {})
        slots = there.get("GPU", 0.0) if on_gpus else there.get("CPU", 0.0) / CPU_PER_SLOT
        found.append(
            Machine(
                name=node["NodeManagerAddress"],
                slots=int(slots + 1e-6),
                resources={
                    name: there[name] for name in there if not name.startswith(OF_EVERY_NODE)
                },
                labels={name: label for name, label in node["Labels"].items() if name != NODE_ID},
                id=node["NodeID"],
            )
        )
    return found


def _answers(node: dict[str, Any]) -> bool:
    with (
        suppress(OSError),
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=5),
    ):
        return True
    return False


def expected_machines(on_gpus: bool, declared: str | None) -> list[Machine]:
    """The machines of a run that starts nothing: of a declared cluster, of the joined Ray, or this
    one.
    """
    if declared:
        sizes = machine.declared_machines(declared)
        return [Machine(name=f"node {number}", slots=size) for number, size in enumerate(sizes)]
    if ray.is_initialized():
        return machines(on_gpus)
    return [
        Machine(
            name="this machine",
            slots=machine.count_gpus() if on_gpus else int(own_cores() / CPU_PER_SLOT),
        )
    ]


def places_now(plan: Placement) -> Places:
    """The machine of every process: free ones if there are enough, otherwise machines on which
    others must end first.
    """
    return plan.places(machines(plan.on_gpus, free=True)) or plan.check(machines(plan.on_gpus))


def _start_ray(plan: Placement) -> str:
    """Start a Ray that ends with the run. Returns its session folder."""
    services.ConsolePopen = _spawn  # type: ignore[assignment, misc]
    chosen = {name: value for name, value in OWN_RAY.items() if f"RAY_{name}" not in os.environ}
    # The autoscaler and the reader of logs have nothing to do here.
    parameter.RayParams = LEAN  # type: ignore[assignment, misc]
    _Started.mark = f"{os.getpid()}-{time.time_ns()}"
    os.environ[STARTED_BY] = _Started.mark
    try:
        context = _init_ray(
            "local",
            num_cpus=own_cores(),
            include_dashboard=False,
            object_store_memory=None if plan.on_gpus else OBJECT_STORE_BYTES,
            _system_config=chosen,
            **QUIET,
        )
    except Exception as error:  # Ray raises no narrower class
        raise PlacementError(
            f"Ray did not start here: {error} If the machine is busy, try again."
        ) from error
    return str(context.address_info["session_dir"])  # type: ignore[attr-defined]


def _init_ray(*args: Any, **options: Any) -> Any:
    """Call `ray.init` in a thread. If the process is asked to end meanwhile, kill what has been
    started, and end.

    In the main thread `ray.init` would replace the handler of SIGTERM, and see the signal after
    half a minute.
    """
    logging.getLogger(worker.__name__).setLevel(
        logging.ERROR
    )  # it would warn that it sets no handler
    answer = Future[Any]()

    def init() -> None:
        try:
            answer.set_result(ray.init(*args, **options))
        except BaseException as error:
            answer.set_exception(error)
        threading.Event().wait()  # Linux kills Ray's processes when the thread that started them ends

    threading.Thread(target=init, name="ray-init", daemon=True).start()
    try:
        context = answer.result()
    except (SystemExit, KeyboardInterrupt):
        if termination.asked():
            _Started.spawning.acquire()  # for good
            kill_started_ray()
            termination.end_at_once()
        raise
    if threading.current_thread() is threading.main_thread():
        for (
            number
        ) in termination.ENDINGS:  # Ray has put a handler below Python's, which dumps a stack first
            signal.signal(number, signal.getsignal(number))
    return context


class _Started:
    spawning = threading.Lock()
    mark = ""  # STARTED_BY of this process's own Ray; the environment may have that of a parent's


def _spawn(*args: Any, **options: Any) -> "subprocess.Popen[Any]":
    """Start a process of Ray in a process group of its own.

    Schedulers and `timeout` send SIGTERM to the process group. In that group Ray would end before
    the run has.
    """
    with _Started.spawning:
        return subprocess.Popen(*args, process_group=0, **options)


def kill_started_ray() -> bool:
    """Kill all processes of the Ray that this process has started, wherever they are. Returns False
    if there are none.
    """
    if not _Started.mark:
        return False
    mark = f"{STARTED_BY}={_Started.mark}".encode()
    killed = False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with suppress(OSError):  # it ended meanwhile, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed = True
    return killed


def own_cores() -> int:
    """The CPUs of a Ray that we start."""
    return max(os.cpu_count() or 1, 4)


def _answering_address() -> str | None:
    """The address in RAY_ADDRESS, or the address that `ray start` noted on this machine; None if
    there is neither.

    The note of `ray start` outlives its cluster, and `ray.init` would wait for that cluster for
    minutes. So a noted address that does not answer is ignored. Raises PlacementError if nothing
    answers at RAY_ADDRESS.
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
