"""The Ray cluster of a run: a running cluster that the run joins, or a new one for the run."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray._private import parameter, services
from ray.exceptions import AuthenticationError

from openrlhf.config.flags import UserError
from openrlhf.distributed.placement import Placement, PlacementError, check_capacity

# Bytes, for a Ray that we start on a machine without GPUs: batches are flat and small.
OBJECT_STORE_BYTES = 512 << 20
LEAN = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)  # type: ignore[arg-type]
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextmanager
def ray_cluster(plan: Placement) -> Iterator[None]:
    """Join the Ray of RAY_ADDRESS, of the job, or of `ray start` on this machine; otherwise start a Ray for the run.

    Raises PlacementError if the Ray of RAY_ADDRESS cannot be joined, or if the cluster is too small for the plan.
    """
    started = not ray.is_initialized()
    session = _start_ray(plan) if join_ray() is None else None
    with _plain_sigterm():
        try:
            check_capacity(plan, ray.cluster_resources())
            yield
        finally:
            if started:
                ray.shutdown()
            error = sys.exception()
            # Ray's logs stay after an error, but not after a mistake in flags, data or files, which is a ValueError.
            if session and (not error or (isinstance(error, UserError) and isinstance(error, ValueError))):
                shutil.rmtree(session, ignore_errors=True)


@contextmanager
def _plain_sigterm() -> Iterator[None]:
    """Within it, SIGTERM ends the process in order, with status 143. Ray's own handler dumps a stack first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != own:  # in a process that a library has forked
            os._exit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            raise
        with suppress(OSError):  # the reader of a pipe may have been terminated too
            print("\nterminated", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from None  # a call of Ray turns the status that `end` raised into 1
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)


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


def _start_ray(plan: Placement) -> str:
    """Start a Ray that ends with the run. Returns its session folder."""
    # Schedulers and `timeout` send SIGTERM to the process group. In that group Ray would end before the run has.
    services.ConsolePopen = partial(subprocess.Popen, process_group=0)  # type: ignore[assignment, misc]
    # Autoscaler, reader of logs and spare workers have nothing to do here, and cost seconds of a small machine.
    parameter.RayParams = LEAN  # type: ignore[assignment, misc]
    try:
        context = ray.init(
            "local",
            num_cpus=max(os.cpu_count() or 1, 4),
            include_dashboard=False,
            object_store_memory=None if plan.on_gpus else OBJECT_STORE_BYTES,
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            **QUIET,
        )
    except Exception as error:  # Ray raises no narrower class
        raise PlacementError(f"Ray did not start here: {error} If the machine is busy, try again.") from error
    return str(context.address_info["session_dir"])  # type: ignore[attr-defined]


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
