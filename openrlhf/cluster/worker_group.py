"""Worker hosts and groups: one Ray actor per device slot, any set of roles in it, calls by method
reference.

group.launch(PolicyWorker.update, [first_slice, second_slice])  ->  calls, one for every data slice
gather(calls, timeout_s=…, doing="update the policy")           ->  results, or an error that names
the culprit
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

# What Ray raises for a call to a process that has died, or that Ray has killed because the
# machine's memory is used up.
DEATHS = (RayActorError, OutOfMemoryError)
TOLD_S = 5.0  # in which Ray tells that a process has died
Span = tuple[
    float, float
]  # beginning and end of the time in which a role worked, in seconds of the clock


class WorkerError(UserError, RuntimeError):
    """A worker process died, or did not answer in time. The message names the process, its task,
    and its log.
    """


@dataclass(frozen=True)
class Call:
    """A call to one process, or the same call to several; the first answer counts. `logs`: their
    log files.

    `spans`: where `gather` notes the time that a role worked on the call.
    """

    references: tuple[Any, ...]
    logs: tuple[str, ...]
    spans: list[Span] | None = None


@dataclass(frozen=True)
class Answer:
    """What a role answered, and when it worked on it."""

    value: Any
    span: Span


class WorkerHost:
    """The process of one device slot. Hosts any set of roles, which all use the same process group
    and libraries.
    """

    def __init__(self) -> None:
        self.roles: dict[str, Any] = {}
        self.strategy: Any = None

    def prepare(self) -> None:
        """Import Transformers, which takes seconds. DeepSpeed comes later: it reads the environment
        that `connect` sets.
        """
        with quick_imports():
            import transformers.models.auto.modeling_auto  # noqa: F401

    def gpus(self) -> list[str]:
        """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def meeting_point(self, log_path: str) -> tuple[str, int]:
        """An address and port of this process's machine at which a group can meet. Output goes to
        the log.
        """
        redirect_output(log_path)
        return ray.util.get_node_ip_address(), free_port()

    def connect(
        self, environment: dict[str, str], settings: dict[str, Any], plugins: Sequence[str]
    ) -> None:
        """Join the process group of the host group. `settings` are the keyword arguments of
        `Strategy`.
        """
        os.environ.update(environment)
        # Imported here: DeepSpeed reads the environment above when it is imported.
        with quick_imports():
            from openrlhf.training.strategy import Strategy
        self.strategy = Strategy(**settings)
        load_plugins(plugins)

    def add_role(self, role: str, worker: Callable[..., Any], settings: Any) -> None:
        """Create a worker, `worker(strategy, settings)`, for the role `role`."""
        self.roles[role] = worker(self.strategy, settings)

    def call(self, role: str, method: str, *args: Any) -> Answer:
        """Call a method of a role."""
        began = time.time()
        value = getattr(self.roles[role], method)(*args)
        return Answer(value, (began, time.time()))


class HostHandles:
    """The processes of one host group. They import libraries from the start; `connect` makes them a
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
        self.group, self.layout = group, layout
        self.ordering = (
            threading.Lock()
        )  # every rank must get calls in the same order: some are collective
        self.spans: list[Span] = []
        self.slots = Slots(group, machines, on_gpus=on_gpus)
        environment = worker_environment("cuda" if on_gpus else "cpu", threads=threads)
        host_class: Any = ray.remote(WorkerHost)
        self.actors: list[Any] = [  # by rank
            host_class.options(
                **self.slots.options(process), runtime_env={"env_vars": environment}
            ).remote()
            for process in range(group.processes)
        ]
        self.gpus = [actor.gpus.remote() for actor in self.actors]  # of each process, on their way
        for actor in self.actors:
            actor.prepare.remote()

    def take_spans(self) -> list[Span]:
        """When the roles worked, since the last call."""
        spans = list(self.spans)
        del self.spans[: len(spans)]  # other threads may add spans meanwhile
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
        """Make the processes one process group. `settings` are arguments of `Strategy` besides the layout.

        Raises PlacementError or WorkerError if they do not start in time.
        """
        self.slots.wait(timeout_s)
        folder = Path(log_dir).absolute()
        self.logs = [
            str(folder / f"{self.group.name}-{slot}.log") for slot in range(self.group.processes)
        ]
        doing = f"start the {self.group.name} processes"
        asked = [self.call([rank], "meeting_point", log) for rank, log in enumerate(self.logs)]
        [(host, port), *_] = gather(asked, timeout_s=timeout_s, doing=doing)
        common = {
            "WORLD_SIZE": str(self.group.processes),
            "LOCAL_WORLD_SIZE": str(self.group.per_node),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        joined: list[Call] = []
        for rank in range(self.group.processes):
            local = (
                0 if self.slots.on_gpus else rank % self.group.per_node
            )  # an actor's own GPU is its number 0
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            arguments = settings | {"layout": self.layout}
            joined.append(self.call([rank], "connect", environment, arguments, plugins))
        gather(joined, timeout_s=timeout_s, doing=doing)

    def call(self, ranks: Sequence[int], method: str, *args: Any) -> Call:
        """Call a method of `WorkerHost` in the processes of `ranks`."""
        asked = tuple(getattr(self.actors[rank], method).remote(*args) for rank in ranks)
        return Call(asked, tuple(self.logs[rank] for rank in ranks))


class WorkerGroup:
    """The workers of one role, one per rank of their host group."""

    def __init__(self, hosts: HostHandles, role: str) -> None:
        self.hosts, self.role, self.layout = hosts, role, hosts.layout
        self.slices = self.layout.dp  # into which a batch is cut for this role
        self._ranks = range(self.layout.world_size)

    def create(self, worker: type, settings: Any) -> list[Call]:
        """Create the role's worker in every process."""
        return [
            self.hosts.call([rank], "add_role", self.role, worker, settings) for rank in self._ranks
        ]

    def launch(self, method: Callable[..., Any], per_slice: Sequence[Any]) -> list[Call]:
        """Send each data slice to every rank that works on the slice: one call per slice."""
        slices = list(zip(self.layout.slice_ranks(), map(ray.put, per_slice), strict=True))
        with self.hosts.ordering:
            first, *others = [self._call(ranks, method, argument) for ranks, argument in slices]
        return [replace(first, spans=self.hosts.spans), *others]  # one slice stands for all

    def broadcast(self, method: Callable[..., Any], *args: Any) -> list[Call]:
        """Call `method` on every rank with the same arguments."""
        with self.hosts.ordering:
            return [self._call([rank], method, *args) for rank in self._ranks]

    def _call(self, ranks: Sequence[int], method: Callable[..., Any], *args: Any) -> Call:
        return self.hosts.call(ranks, "call", self.role, method.__name__, *args)


def gather(
    calls: Sequence[Call],
    *,
    timeout_s: float,
    doing: str,
    flag: str = "--train.step_timeout (or --train.setup_timeout while a run starts)",
) -> list[Any]:
    """The results, in order. A call to several ranks gives the result of the first rank, after all
    ranks have answered.

    `doing` completes "… did not <doing> within …", `flag` names the flag of the timeout. The first
    failure ends the wait, because other ranks may hang in a collective after the failure. Raises
    WorkerError if a process died or the timeout passed. An exception of a worker's code is raised
    unchanged.
    """
    deadline = time.monotonic() + timeout_s
    log_of = {
        reference: log
        for call in calls
        for reference, log in zip(call.references, call.logs, strict=True)
    }
    waiting, done = list(log_of), list[Any]()
    try:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise WorkerError(
                    f"{len(waiting)} of {len(log_of)} processes did not {doing} within {timeout_s:g} s: "
                    f"{', '.join(log_of[reference] for reference in waiting)}. Look at these logs. If the processes are "
                    f"merely slow, raise {flag}."
                )
            ray.get(done)
        return [_noted(ray.get(call.references[0]), call) for call in calls]
    except RayTaskError as error:
        # The worker's own exception: its message alone tells a user what to change. One that is not
        # meant for users may be a peer's view of a death.
        lost = None if isinstance(error.cause, UserError) else _death(waiting, log_of, doing)
        raise lost or error.cause from error
    except DEATHS as error:
        raise _died(error, log_of[done[0]], doing) from error


def _death(waiting: Sequence[Any], log_of: Mapping[Any, str], doing: str) -> WorkerError | None:
    """The death of one of these processes, if there was one: its peers in a collective may fail
    before Ray tells.
    """
    for reference in (
        ray.wait(list(waiting), num_returns=len(waiting), timeout=TOLD_S)[0] if waiting else []
    ):
        try:
            ray.get(reference)
        except DEATHS as error:
            return _died(error, log_of[reference], doing)
        except RayTaskError:  # one more of its peers
            pass
    return None


def _died(error: Exception, log: str, doing: str) -> WorkerError:
    return WorkerError(
        f"a process died while the run was about to {doing}: {reason_of_death(error)}. Its log: {log}"
    )


def reason_of_death(error: Exception) -> str:
    """Return the message of one of `DEATHS`, without Ray's lists of the machine's processes and
    objects.
    """
    if not isinstance(error, OutOfMemoryError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    return (
        f"Ray killed it, because the machine ran out of memory ({first_line}) Use smaller micro-batches, fewer processes or "
        "engines on this machine, or offload"
    )


def _noted(answer: Any, call: Call) -> Any:
    if not isinstance(answer, Answer):
        return answer
    if call.spans is not None:
        call.spans.append(answer.span)
    return answer.value
