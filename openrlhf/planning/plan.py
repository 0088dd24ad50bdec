"""A memory plan: the contents of each device's memory at each instant, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.config.supervised import SupervisedConfig
from openrlhf.planning.cluster import Cluster
from openrlhf.planning.constants import CPU, CUDA, Constants
from openrlhf.planning.engines import predict_engine, smallest_engine
from openrlhf.planning.offline_roles import offline_roles
from openrlhf.planning.prediction import drive_bytes, machine_bytes, predict_role
from openrlhf.planning.roles import Hosts
from openrlhf.planning.usage import Instant, Usage, gib

FILLED = 0.98  # the share of a device's memory that a plan may use; the driver needs the rest
# Instants at which all models in a process are in the same state.
AT_REST = (Instant.IDLE, Instant.GENERATE)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A model in a process, or an engine, with its memory by instant."""

    name: str
    usage: dict[Instant, Usage]


@dataclass(frozen=True, kw_only=True)
class Process:
    """Processes that host the same models. Within a process, the models run one at a time."""

    tenants: tuple[Tenant, ...]
    count: int  # processes that share the memory
    framework: int  # size of each process in bytes, before its first model

    def at(self, instant: Instant) -> dict[str, Usage]:
        """Return the memory of the framework and of each tenant, with one tenant active.

        The active tenant is the tenant whose memory grows the most at this instant.
        """

        def growth(tenant: Tenant) -> int:
            return tenant.usage[instant].total - tenant.usage[Instant.IDLE].total

        active = max(self.tenants, key=growth)
        held: dict[str, Usage] = {"framework": Usage(framework=self.framework) * self.count}
        for tenant in self.tenants:
            state = Instant.IDLE
            if instant in AT_REST or tenant is active:
                state = instant
            usage = tenant.usage[state] * self.count
            held[tenant.name] = held.get(tenant.name, Usage()) + usage
        return held


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Memory that several processes share: a GPU's memory, or the memory of a CPU machine."""

    name: str
    capacity: int  # bytes
    count: int  # number of devices of this kind
    processes: tuple[Process, ...]
    constants: Constants
    problems: tuple[str, ...] = ()  # reasons why the run cannot start, regardless of the total
    host_bytes: int = 0  # CPU memory per machine, for offloaded state
    drive_bytes: int = 0  # space on the drive of each machine, for offloaded state

    def at(self, instant: Instant) -> dict[str, Usage]:
        """Return the memory of each model and of the framework, by name."""
        held: dict[str, Usage] = {}
        for process in self.processes:
            for name, usage in process.at(instant).items():
                held[name] = held.get(name, Usage()) + usage
        return held

    def total(self, instant: Instant) -> int:
        """Return the number of bytes in use."""
        return sum(usage.total for usage in self.at(instant).values())

    @property
    def peak(self) -> Instant:
        """The instant with the highest total."""
        return max(Instant, key=self.total)

    @property
    def reserved(self) -> int:
        """The number of bytes that must remain free at the peak.

        Part of the memory is for the driver, and part for prediction errors. No reserve is needed
        for the KV cache, whose size is set, or for a running engine's share of a GPU, because vLLM
        fills all memory left free by the weights.
        """
        predicted = 0
        for usage in self.at(self.peak).values():
            predicted += usage.total - usage.kv_cache
            if usage.kv_cache and self.constants.device == "cuda":
                predicted -= usage.weights
        return round(self.capacity * (1 - FILLED) + self.constants.reserve * predicted)

    @property
    def room(self) -> int:
        """The number of spare bytes at the peak; negative if the memory is too small."""
        return self.capacity - self.reserved - self.total(self.peak)

    @property
    def fits(self) -> bool:
        """True if the memory suffices at every instant."""
        return self.room >= 0 and not self.problems

    @property
    def holds_weights(self) -> bool:
        """True if the weights alone fit."""
        at_rest = self.at(Instant.IDLE).values()
        return sum(usage.weights + usage.framework for usage in at_rest) <= self.capacity

    @property
    def cause(self) -> tuple[str, str, int]:
        """The model and kind of memory with the largest size at the peak, and that size."""
        largest = ("", "", 0)
        for name, usage in self.at(self.peak).items():
            for kind, size in vars(usage).items():
                if size > largest[2]:
                    largest = (name, kind, size)
        return largest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory of a run on a cluster."""

    cluster: Cluster
    constants: Constants
    pools: tuple[Pool, ...]
    devices: int  # number of devices that the run needs

    @property
    def shortage(self) -> str:
        """A message if the cluster has too few devices, or else an empty string."""
        if not self.cluster.on_gpus or self.devices <= self.cluster.devices:
            return ""
        return f"The run needs {self.devices} devices; the cluster has {self.cluster.devices}."

    @property
    def fits(self) -> bool:
        """True if every pool fits and there are enough devices."""
        return not self.shortage and all(pool.fits for pool in self.pools)

    @property
    def holds_weights(self) -> bool:
        """True if the weights alone fit on every device."""
        return all(pool.holds_weights for pool in self.pools)

    @property
    def host_bytes(self) -> int:
        """CPU memory for offloaded state, if every pool has devices on the same machine."""
        return sum(pool.host_bytes for pool in self.pools)

    @property
    def drive_bytes(self) -> int:
        """Space on a machine's drive, if every pool has devices on the same machine."""
        return sum(pool.drive_bytes for pool in self.pools)

    @property
    def tightest(self) -> Pool:
        """The memory pool with the least spare memory."""
        return min(self.pools, key=lambda pool: pool.room)


def make_plan(config: Any, cluster: Cluster) -> Plan:
    """Return the memory plan of a resolved training command on a cluster.

    Offline commands run one process per device. Raises PlanError if the sizes of a model cannot be
    read.
    """
    ranks = cluster.devices
    constants = CUDA
    if not cluster.on_gpus:  # a machine can run all processes that share a sequence
        ranks = max(ranks, config.ds.ranks_per_slice)
        constants = CPU
    groups = hosts_of(config, ranks=ranks, on_gpus=cluster.on_gpus)
    if cluster.on_gpus:
        pools = [_device_pool(group, cluster, constants) for group in groups]
    else:
        processes: list[Process] = []
        for group in groups:
            processes += _processes(group, cluster, constants)
        on_drive = 0
        for group in groups:
            on_drive += _drive_bytes(group, group.processes // cluster.nodes, constants)
        pools = [replace(_pool(processes, cluster, constants), drive_bytes=on_drive)]
    devices = sum(group.devices for group in groups)
    return Plan(cluster=cluster, constants=constants, pools=tuple(pools), devices=devices)


def hosts_of(config: Any, *, ranks: int, on_gpus: bool) -> list[Hosts]:
    """Return the groups of a run's processes. Offline commands run `ranks` processes."""
    if isinstance(config, SupervisedConfig):
        return [Hosts(processes=ranks, roles=offline_roles(config, ranks, on_gpus))]
    # Importing the RL flags takes 40 ms, which offline commands should not spend.
    from openrlhf.planning.rl_roles import rl_hosts

    return rl_hosts(config, on_gpus=on_gpus)


def _processes(group: Hosts, cluster: Cluster, constants: Constants) -> Iterator[Process]:
    """Yield the processes of a group's models, and a separate process for its engine."""
    if group.roles:
        tenants: list[Tenant] = []
        for role in group.roles:
            tenants.append(Tenant(name=role.name, usage=predict_role(role, constants)))
        yield Process(
            tenants=tuple(tenants), count=group.processes, framework=constants.process_bytes
        )
    if group.engine:
        usage = predict_engine(group.engine, constants, cluster.device_bytes)
        tenant = Tenant(name="engine", usage=usage)
        yield Process(tenants=(tenant,), count=group.engines, framework=0)


def _pool(processes: Sequence[Process], cluster: Cluster, constants: Constants) -> Pool:
    """Return the memory of a device, or of a CPU machine, which runs all processes."""
    names: dict[str, None] = {}  # an ordered set
    for process in processes:
        names |= dict.fromkeys(tenant.name for tenant in process.tenants)
    return Pool(
        name=", ".join(names),
        capacity=cluster.device_bytes,
        count=1,
        processes=tuple(processes),
        constants=constants,
    )


def _device_pool(group: Hosts, cluster: Cluster, constants: Constants) -> Pool:
    """Return the memory of one device in a group."""
    on_machine = min(group.devices, cluster.per_node)
    host = 0
    for role in group.roles:
        host += machine_bytes(role, constants, on_machine)
    problems: list[str] = []
    engine = group.engine
    if engine:
        if engine.sleeps:
            host += on_machine * round(engine.weight_bytes)
        share = engine.memory_share or 1.0
        needed = smallest_engine(engine, constants)
        if needed > share * cluster.device_bytes:
            problems.append(
                f"The engine needs {gib(needed)} per device for its weights and a sequence of "
                f"{engine.max_len} tokens, more than {share:g} of {gib(cluster.device_bytes)} "
                "(--vllm.gpu_memory_utilization)."
            )
    processes = [replace(process, count=1) for process in _processes(group, cluster, constants)]
    return replace(
        _pool(processes, cluster, constants),
        count=group.devices,
        problems=tuple(problems),
        host_bytes=host,
        drive_bytes=_drive_bytes(group, on_machine, constants),
    )


def _drive_bytes(group: Hosts, processes: int, constants: Constants) -> int:
    """Return the size of the state that a group's processes on one machine keep on its drive."""
    return processes * sum(drive_bytes(role, constants) for role in group.roles)
