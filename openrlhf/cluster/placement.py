"""The devices of each role: a pure plan from flags and machines to processes, and Ray placement
groups for the plan.

A *device slot* is a GPU on a machine with GPUs, and room for a process on a machine without. Roles
of one group share their slots: each slot is one process that hosts all of them. Engines may share
the slots of a group too (hybrid engine).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.flags import UserError
from openrlhf.config.rollout import VLLMConfig

# Processes on a CPU mostly wait for each other, so that ten can use one core.
CPU_PER_SLOT = 0.1
NODE_ID = "ray.io/node-id"  # a label that Ray gives every node
Wants = Mapping[
    str, float | str
]  # by name: an amount of a Ray resource, or the value of a node's label


class PlacementError(UserError, RuntimeError):
    """The cluster does not have the devices that the flags ask for."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node of the cluster: its device slots, and other resources and labels that Ray knows of it."""

    name: str
    slots: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    id: str = ""  # Ray's; empty in a cluster that is only declared

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for machines that can stand for each other."""
        return self.slots, sorted(self.resources.items()), sorted(self.labels.items())

    def room(self, group: "HostGroup") -> int:
        """The number of processes of a group for which there is room."""
        if any(self.labels.get(name) != value for name, value in group.labels.items()):
            return 0
        limits = (self.resources.get(name, 0.0) / amount for name, amount in group.amounts.items())
        return min([self.slots // group.devices, *(int(limit + 1e-6) for limit in limits)])

    def without(self, group: "HostGroup", processes: int) -> "Machine":
        """What is left beside these processes of a group."""
        left = {
            name: there - processes * group.amounts.get(name, 0.0)
            for name, there in self.resources.items()
        }
        return replace(self, slots=self.slots - processes * group.devices, resources=left)


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """Processes that belong together, each hosting all `roles` on `devices` slots of one machine.

    With `nodes`, there are `per_node` processes on each of so many machines. Without, there are
    `per_node` processes in all, wherever there is room. `wants` is what each process needs besides
    slots. The processes of a group that `shares` the slots of another group use these slots in
    order.
    """

    name: str
    roles: tuple[str, ...]
    nodes: int | None = None
    per_node: int
    devices: int = 1
    wants: Wants = field(default_factory=dict)
    shares: str | None = None

    @property
    def processes(self) -> int:
        """Number of processes."""
        return (self.nodes or 1) * self.per_node

    @property
    def slots(self) -> int:
        """Number of device slots that no other group has."""
        return 0 if self.shares else self.processes * self.devices

    @property
    def labels(self) -> dict[str, str]:
        """The labels that a machine must have."""
        return {name: value for name, value in self.wants.items() if isinstance(value, str)}

    @property
    def amounts(self) -> dict[str, float]:
        """The Ray resources that each process takes."""
        return {
            name: value
            for name, value in self.wants.items()
            if not isinstance(value, str) and value
        }


def engine_group(
    vllm: VLLMConfig, name: str, *, shares: str | None = None, wants: Wants | None = None
) -> HostGroup:
    """The engines of a model: a process each, with the devices of all its workers."""
    return HostGroup(
        name=name,
        roles=(name,),
        per_node=vllm.num_engines,
        devices=vllm.devices,
        shares=shares,
        wants=wants or {},
    )


Places = Mapping[str, Sequence[Machine]]  # the machine of each process, by group


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All host groups of a run. A slot is a GPU if `on_gpus`, otherwise room for a process on a
    CPU.
    """

    groups: tuple[HostGroup, ...]
    on_gpus: bool

    @property
    def slots(self) -> int:
        """Number of device slots of all groups."""
        return sum(group.slots for group in self.groups)

    def places(self, machines: Sequence[Machine]) -> Places | None:
        """The machine of every process; None if the groups do not fit. The fullest machines are
        used first.
        """
        own = [group for group in self.groups if not group.shares]
        # Groups on whole machines go before groups that go anywhere, large ones before small ones.
        own.sort(key=lambda group: (group.nodes is None, -group.per_node * group.devices))
        found = next(_fillings(own, machines), None)
        if found is None:
            return None
        places = {name: [machines[index] for index in indices] for name, indices in found.items()}
        by_name = {group.name: group for group in self.groups}
        for group in self.groups:
            if group.shares:
                host, needed = by_name[group.shares], group.processes * group.devices
                if needed > host.processes or host.per_node % group.devices:
                    return None
                places[group.name] = places[host.name][: needed : group.devices]
        return places

    def check(self, machines: Sequence[Machine]) -> Places:
        """The machine of every process. Raises PlacementError, with the sum."""
        if (places := self.places(machines)) is not None:
            return places
        kind = "GPUs" if self.on_gpus else "CPU processes"
        sizes = Counter(machine.slots for machine in machines)
        cluster = " + ".join(
            f"{count} x {size}" for size, count in sorted(sizes.items(), reverse=True)
        )
        needed = " + ".join(
            f"{_count(group)} for {_named(group)}" for group in self.groups if not group.shares
        )
        wants = [f"{_named(group)}: {dict(group.wants)}" for group in self.groups if group.wants]
        raise PlacementError(
            f"the run needs {self.slots} {kind} ({needed}; machines x {kind}), and the cluster has "
            f"{sum(machine.slots for machine in machines)} ({cluster or 'no machine'}). "
            + (f"It also asks for {'; '.join(wants)} (--placement.*.resources). " if wants else "")
            + "Roles can share devices: --train.colocate_all, --train.colocate_actor_ref, --train.colocate_critic_reward. "
            "`ray start` adds machines."
        )

    def describe(self, places: Places) -> str:
        """The plan in one line per group: roles, processes, and the devices of which machine."""
        kind, lines = "GPU" if self.on_gpus else "CPU process", list[str]()
        for group in self.groups:
            devices = f", {group.devices} {kind}s each" if group.devices > 1 else ""
            where = ", ".join(
                f"{count} on {name}"
                for name, count in Counter(m.name for m in places[group.name]).items()
            )
            shared = f", on devices of {group.shares.replace('+', ', ')}" if group.shares else ""
            lines.append(
                f"{_named(group)}: {group.processes} process(es){devices}: {where}{shared}"
            )
        return "\n".join(lines)


def _fillings(
    groups: Sequence[HostGroup], machines: Sequence[Machine]
) -> Iterator[dict[str, list[int]]]:
    """Every way to place the groups: for each group, the number of the machine of each process."""
    if not groups:
        yield {}
        return
    group, *rest = groups
    fullest_first = sorted(range(len(machines)), key=lambda index: machines[index].slots)
    for processes in _choices(group, machines, fullest_first):
        left = [machine.without(group, processes[index]) for index, machine in enumerate(machines)]
        for others in _fillings(rest, left):
            yield {group.name: sorted(processes.elements())} | others


def _choices(
    group: HostGroup, machines: Sequence[Machine], order: Sequence[int]
) -> Iterator[Counter[int]]:
    """Every way to place one group: the number of processes on each machine. Machines of a kind
    count as the same.
    """
    if group.nodes is None:  # comes last, so one way is enough
        processes = Counter[int]()
        for index in order:
            processes[index] = min(machines[index].room(group), group.per_node - processes.total())
        if processes.total() == group.per_node:
            yield processes
        return
    usable = [index for index in order if machines[index].room(group) >= group.per_node]
    usable.sort(key=lambda index: str(machines[index].kind))
    kinds = [list(same) for _, same in groupby(usable, key=lambda index: machines[index].kind)]
    kinds.sort(key=lambda same: machines[same[0]].slots)
    for chosen in _taken(kinds, group.nodes):
        yield Counter({index: group.per_node for index in chosen})


def _taken(kinds: Sequence[Sequence[int]], number: int) -> Iterator[list[int]]:
    """Every way to take so many machines, if machines of one kind are the same."""
    if not kinds:
        if not number:
            yield []
        return
    first, *rest = kinds
    for taken in range(min(number, len(first)), -1, -1):
        for others in _taken(rest, number - taken):
            yield [*first[:taken], *others]


def _named(group: HostGroup) -> str:
    return ", ".join(group.roles)


def _count(group: HostGroup) -> str:
    shape = f"{group.per_node}" if group.nodes is None else f"{group.nodes} x {group.per_node}"
    return shape if group.devices == 1 else f"{shape} x {group.devices}"


class Slots:
    """The reserved slots of a host group: one bundle of Ray's for each process, on the machine of
    the plan.
    """

    def __init__(self, group: HostGroup, machines: Sequence[Machine], *, on_gpus: bool) -> None:
        self.group, self.machine, self.on_gpus = group, machines[0], on_gpus
        bundle = {"CPU": CPU_PER_SLOT * group.devices} | (
            {"GPU": float(group.devices)} if on_gpus else {}
        )
        there = [{NODE_ID: machine.id} for machine in machines]
        self._bundles: PlacementGroup = placement_group(
            [bundle | group.amounts for _ in there], strategy="PACK", bundle_label_selector=there
        )

    def wait(self, timeout_s: float) -> None:
        """Return when Ray has granted the slots. Raises PlacementError if it does not in time."""
        if not self._bundles.wait(timeout_s):
            raise PlacementError(
                f"Ray did not reserve {self._bundles.bundle_count} × {self._bundles.bundle_specs[0]} for "
                f"{self.group.name} within {timeout_s:g} s (free now: {ray.available_resources()}). Other jobs may hold "
                "the devices; see `ray status`, or raise --train.setup_timeout."
            )

    def options(self, process: int, *, owner: bool = True) -> dict[str, Any]:
        """Ray options for an actor on the slots of a process: the owner of the devices, or a guest."""
        devices = self.group.devices * owner
        return {
            "num_cpus": CPU_PER_SLOT * devices,
            "num_gpus": devices * self.on_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._bundles, placement_group_bundle_index=process
            ),
        }

    def release(self) -> None:
        """Give the slots back."""
        ray.util.remove_placement_group(self._bundles)
