"""Worker processes: one Ray actor per device slot, each hosting the workers of a set of roles.

    calls = group.launch(PolicyWorker.update, [first_slice, second_slice])  # one per data slice
    results = wait_for(calls, timeout_s=600, doing="update the policy")

`wait_for` raises an error that names the failed process and its log.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from openrlhf.cluster.placement import HostGroup, Machine, Slots
from openrlhf.config.flags import UserError
from openrlhf.config.machine import quick_imports
from openrlhf.config.plugins import load_plugins
from openrlhf.training.devices import free_port, redirect_output, worker_environment
from openrlhf.training.layout import RankLayout

# Errors raised by calls to a process that has died.
# OutOfMemoryError means that Ray killed the process because the machine ran out of memory.
DEATHS = (RayActorError, OutOfMemoryError)
DEATH_REPORT_TIMEOUT_S = 5.0  # time that Ray may take to report a process's death
Span = tuple[float, float]  # start and end of a role's work, in seconds since the epoch


class WorkerError(UserError, RuntimeError):
    """An error for a worker process that died or did not answer in time.

    The message names the process, its task and its log.
    """


@dataclass(frozen=True)
class Call:
    """A pending call to one process, or to all ranks of a data slice.

    Only the first rank's result is returned.
    """

    references: tuple[Any, ...]  # Ray's reference to each process's result
    logs: tuple[str, ...]  # log file of each process
    spans: list[Span] | None = None  # `wait_for` appends the time span of the call


@dataclass(frozen=True)
class Answer:
    """The result of a role's method, and the time span in which it ran."""

    value: Any
    span: Span


class WorkerHost:
    """The process on one device slot. Its roles share its process group and loaded libraries."""

    def __init__(self) -> None:
        self.roles: dict[str, Any] = {}
        self.strategy: Any = None

    def prepare(self) -> None:
        """Import Transformers, which takes several seconds.

        `connect` imports DeepSpeed, which reads the environment that `connect` sets.
        """
        with quick_imports():
            import transformers.models.auto.modeling_auto  # noqa: F401

    def gpus(self) -> list[str]:
        """Return this process's GPUs as CUDA_VISIBLE_DEVICES names them; an empty list on a CPU."""
        return list(map(str, ray.get_gpu_ids()))

    def meeting_point(self, log_path: str) -> tuple[str, int]:
        """Redirect output to the log, and return a free address and port for a process group."""
        redirect_output(log_path)
        return ray.util.get_node_ip_address(), free_port()

    def connect(
        self, environment: dict[str, str], settings: dict[str, Any], plugins: Sequence[str]
    ) -> None:
        """Join the process group. `settings` are the keyword arguments of `Strategy`."""
        os.environ.update(environment)
        # This import is here because DeepSpeed reads the environment when it is imported.
        with quick_imports():
            from openrlhf.training.strategy import Strategy
        self.strategy = Strategy(**settings)
        load_plugins(plugins)

    def add_role(self, role: str, worker: Callable[..., Any], settings: Any) -> None:
        """Create a role's worker: `worker(strategy, settings)`."""
        self.roles[role] = worker(self.strategy, settings)

    def call(self, role: str, method: str, *args: Any) -> Answer:
        """Call a method of a role's worker."""
        started = time.time()
        value = getattr(self.roles[role], method)(*args)
        return Answer(value, (started, time.time()))


class HostHandles:
    """The processes of one host group.

    The processes import libraries as soon as they are created. `connect` joins the processes into a
    process group.
    """

    def __init__(
        self,
        group: HostGroup,
        machines: Sequence[Machine],
        layout: RankLayout,
        *,
        on_gpus: bool,
        threads: int,
    ) -> None:
        self.group = group
        self.layout = layout
        # Some calls are collective, so all ranks must receive calls in the same order.
        self.ordering = threading.Lock()
        self.spans: list[Span] = []
        self.slots = Slots(group, machines, on_gpus=on_gpus)
        environment = worker_environment("cuda" if on_gpus else "cpu", threads=threads)
        host_class: Any = ray.remote(WorkerHost)
        self.actors: list[Any] = []  # by rank
        self.gpus: list[Any] = []  # Ray's references to each process's list of GPUs
        for rank in range(group.processes):
            options = self.slots.options(rank)
            host = host_class.options(**options, runtime_env={"env_vars": environment}).remote()
            self.actors.append(host)
            self.gpus.append(host.gpus.remote())
            host.prepare.remote()

    def take_spans(self) -> list[Span]:
        """Return and clear the time spans in which roles have worked since the last call."""
        spans = list(self.spans)
        del self.spans[: len(spans)]  # other threads may have added spans in the meantime
        return spans

    def close(self) -> None:
        """End the processes and release their slots."""
        for host in self.actors:
            ray.kill(host)
        self.slots.release()

    def connect(
        self,
        settings: dict[str, Any],
        *,
        log_dir: str,
        timeout_s: float,
        plugins: Sequence[str] = (),
    ) -> None:
        """Join the processes into one process group.

        `settings` are the keyword arguments of `Strategy` except the layout. Raises PlacementError
        or WorkerError if the processes do not start in time.
        """
        self.slots.wait(timeout_s)
        processes = range(self.group.processes)
        prefix = Path(log_dir).absolute() / self.group.name
        self.logs: list[str] = []
        calls: list[Call] = []
        for rank in processes:
            self.logs.append(f"{prefix}-{rank}.log")
            calls.append(self.call([rank], "meeting_point", self.logs[rank]))
        doing = f"start the {self.group.name} processes"
        [(host, port), *_] = wait_for(calls, timeout_s=timeout_s, doing=doing)
        arguments = settings | {"layout": self.layout}
        calls = []
        for rank in processes:
            local_rank = 0  # an actor sees only its own GPU
            if not self.slots.on_gpus:
                local_rank = rank % self.group.most_per_machine
            environment = {
                "WORLD_SIZE": str(self.group.processes),
                "LOCAL_WORLD_SIZE": str(self.group.most_per_machine),
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
            }
            calls.append(self.call([rank], "connect", environment, arguments, plugins))
        wait_for(calls, timeout_s=timeout_s, doing=doing)

    def call(self, ranks: Sequence[int], method: str, *args: Any) -> Call:
        """Call a method of `WorkerHost` in the processes of `ranks`."""
        references = tuple(getattr(self.actors[rank], method).remote(*args) for rank in ranks)
        return Call(references, tuple(self.logs[rank] for rank in ranks))


class WorkerGroup:
    """The workers of one role, one per rank of their host group.

    `attention_length` is the length in tokens at which attention costs as much as the rest of the
    role's model. This length determines how rows are divided among the ranks. If `attention_length`
    is None, rows are divided by tokens.
    """

    def __init__(
        self, hosts: HostHandles, role: str, *, attention_length: int | None = None
    ) -> None:
        self.hosts = hosts
        self.role = role
        self.attention_length = attention_length
        self.layout = hosts.layout
        self.slices = self.layout.dp  # number of slices into which a batch is split
        self._ranks = range(self.layout.world_size)

    def create(self, worker: type, settings: Any) -> list[Call]:
        """Create the role's worker in every process."""
        arguments = (self.role, worker, settings)
        return [self.hosts.call([rank], "add_role", *arguments) for rank in self._ranks]

    def launch(self, method: Callable[..., Any], per_slice: Sequence[Any]) -> list[Call]:
        """Call `method` with each data slice on every rank that works on it: one call per slice."""
        slices = list(zip(self.layout.slice_ranks(), map(ray.put, per_slice), strict=True))
        with self.hosts.ordering:
            calls = [self._call(ranks, method, argument) for ranks, argument in slices]
        calls[0] = replace(calls[0], spans=self.hosts.spans)  # one span for all slices
        return calls

    def broadcast(self, method: Callable[..., Any], *args: Any) -> list[Call]:
        """Call `method` on every rank with the same arguments."""
        with self.hosts.ordering:
            return [self._call([rank], method, *args) for rank in self._ranks]

    def _call(self, ranks: Sequence[int], method: Callable[..., Any], *args: Any) -> Call:
        return self.hosts.call(ranks, "call", self.role, method.__name__, *args)


def wait_for(
    calls: Sequence[Call],
    *,
    timeout_s: float,
    doing: str,
    flag: str = "--train.step_timeout (or --train.setup_timeout while a run starts)",
) -> list[Any]:
    """Wait until all processes have answered, and return the results of the calls in order.

    A call to several ranks returns the first rank's result. The first failure ends the wait,
    because the remaining ranks may then hang in a collective. `doing` completes the message "… did
    not <doing> within …"; `flag` names the flag that sets the timeout. Raises WorkerError if a
    process dies or the timeout expires; an exception raised by a worker is raised unchanged.
    """
    deadline = time.monotonic() + timeout_s
    log_of: dict[Any, str] = {}
    for call in calls:
        log_of.update(zip(call.references, call.logs, strict=True))
    waiting = list(log_of)
    done: list[Any] = []
    try:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                logs = ", ".join(log_of[reference] for reference in waiting)
                raise WorkerError(
                    f"{len(waiting)} of {len(log_of)} processes did not {doing} within "
                    f"{timeout_s:g} s. Check their logs: {logs}. If the processes are just slow, "
                    f"increase {flag}."
                )
            ray.get(done)
        return list(map(_result, calls))
    except RayTaskError as error:
        # This is the worker's own exception. A UserError explains what to change.
        # Any other error may come from the peer of a process that has died.
        death = None
        if not isinstance(error.cause, UserError):
            death = _find_death(waiting, log_of, doing)
        raise death or error.cause from error
    except DEATHS as error:
        raise _death_error(error, log_of[done[0]], doing) from error


def _result(call: Call) -> Any:
    """Return the result of a finished call, and record the time span in which its role worked."""
    result = ray.get(call.references[0])
    if not isinstance(result, Answer):
        return result
    if call.spans is not None:
        call.spans.append(result.span)
    return result.value


def _find_death(
    waiting: Sequence[Any], log_of: Mapping[Any, str], doing: str
) -> WorkerError | None:
    """Return an error for the first process that has died, or None if all are alive.

    The peers of a dead process may fail in a collective before Ray reports the death.
    """
    if not waiting:
        return None
    ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=DEATH_REPORT_TIMEOUT_S)
    for reference in ended:
        try:
            ray.get(reference)
        except DEATHS as error:
            return _death_error(error, log_of[reference], doing)
        except RayTaskError:  # another peer of a dead process
            pass
    return None


def _death_error(error: Exception, log: str, doing: str) -> WorkerError:
    return WorkerError(
        f"a process died while the run was about to {doing}: {reason_of_death(error)}. "
        f"Its log: {log}"
    )


def reason_of_death(error: Exception) -> str:
    """Return the message of an error in `DEATHS`, without Ray's lists of processes and objects."""
    if not isinstance(error, OutOfMemoryError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    return (
        f"Ray killed it because the machine ran out of memory ({first_line}). Use smaller "
        "micro-batches, fewer processes or engines on this machine, or offloading"
    )
