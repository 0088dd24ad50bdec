"""Places processes on machines: a pure plan, and the Ray placement groups that reserve slots.

A *device slot* is a GPU, or room for one process in a run without GPUs. A group's roles share its
slots: the process on each slot hosts all of them. Engines can share a group's slots too (hybrid
engine).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.flags import UserError
from openrlhf.config.rollout import VLLMConfig

# CPU processes spend most of their time waiting for each other, so ten of them can share a core.
CPU_PER_SLOT = 0.1
NODE_ID = "ray.io/node-id"  # a label that Ray gives every node
ROUNDING = 1e-6  # tolerance for resource amounts, which are floating-point numbers
# Ray resource name → amount, or node label name → value.
Wants = Mapping[str, float | str]


class PlacementError(UserError, RuntimeError):
    """An error for a cluster that lacks required devices or cannot be joined."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cluster node, with its device slots, other Ray resources and labels."""

    name: str
    slots: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    id: str = ""  # Ray's node id; empty in a declared cluster

    @property
    def kind(self) -> str:
        """A key that is the same for interchangeable machines."""
        return f"{self.slots} {sorted(self.resources.items())} {sorted(self.labels.items())}"

    def room(self, group: "HostGroup") -> int:
        """Return how many of a group's processes fit on the machine."""
        room = self.slots // group.devices
        for name, wanted in group.wants.items():
            if isinstance(wanted, str):
                if self.labels.get(name) != wanted:
                    return 0
            else:
                fitting = self.resources.get(name, 0.0) / wanted
                room = min(room, int(fitting + ROUNDING))
        return room

    def without(self, group: "HostGroup", processes: int) -> "Machine":
        """Return the machine without the slots and resources that these processes take."""
        left = dict(self.resources)
        for name, amount in group.amounts.items():
            if name in left:
                left[name] -= processes * amount
        return replace(self, slots=self.slots - processes * group.devices, resources=left)


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """Processes, each of which hosts all `roles` on `devices` slots of one machine."""

    name: str
    roles: tuple[str, ...]
    processes: int
    # The number of processes on each machine; None if any machine may have any number.
    per_machine: int | None = None
    devices: int = 1
    wants: Wants = field(default_factory=dict)  # requirements of each process besides its slots
    # The group whose slots these processes share, in order. The flags' rules ensure that they fit.
    shares: str | None = None

    @property
    def most_per_machine(self) -> int:
        """The largest number of processes that one machine may have."""
        return self.per_machine or self.processes

    @property
    def slots(self) -> int:
        """The number of device slots that this group reserves for itself."""
        return 0 if self.shares else self.processes * self.devices

    @property
    def amounts(self) -> dict[str, float]:
        """The Ray resources that each process requires."""
        return {name: value for name, value in self.wants.items() if not isinstance(value, str)}

    def __str__(self) -> str:
        return ", ".join(self.roles)


def engine_group(
    vllm: VLLMConfig, name: str, *, shares: str | None = None, wants: Wants | None = None
) -> HostGroup:
    """Return the group of a model's engines: each engine is a process with its workers' devices."""
    return HostGroup(
        name=name,
        roles=(name,),
        processes=vllm.num_engines,
        devices=vllm.devices,
        shares=shares,
        wants=wants or {},
    )


Places = Mapping[str, Sequence[Machine]]  # group name → machine of each process


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The host groups of a run."""

    groups: tuple[HostGroup, ...]
    on_gpus: bool  # True: a slot is a GPU. False: a slot is room for a process on a CPU.

    @property
    def slots(self) -> int:
        """The total number of device slots of all groups."""
        return sum(group.slots for group in self.groups)

    @property
    def _devices(self) -> str:
        return "GPUs" if self.on_gpus else "CPU processes"

    def places(self, machines: Sequence[Machine]) -> Places | None:
        """Return the machine of every process, or None if the groups do not fit.

        The machines with the fewest free slots are filled first.
        """
        owners = [group for group in self.groups if not group.shares]
        # Place groups that need entire machines first, and large groups before small ones.
        owners.sort(
            key=lambda group: (group.per_machine is None, -group.most_per_machine * group.devices)
        )
        filling = next(_fillings(owners, machines), None)
        if filling is None:
            return None
        places: dict[str, list[Machine]] = {}
        for name, indices in filling.items():
            places[name] = [machines[index] for index in indices]
        for group in self.groups:
            if group.shares:
                needed = group.processes * group.devices
                places[group.name] = places[group.shares][: needed : group.devices]
        return places

    def check(self, machines: Sequence[Machine]) -> Places:
        """Return the machine of every process. Raises PlacementError if the groups do not fit."""
        places = self.places(machines)
        if places is None:
            raise PlacementError(self._describe_shortage(machines))
        return places

    def _describe_shortage(self, machines: Sequence[Machine]) -> str:
        needed: list[str] = []
        wants = ""
        for group in self.groups:
            if group.wants:
                wants += f"{group}: {dict(group.wants)} (--placement.*.resources). "
            if not group.shares:
                slots = f"{group.most_per_machine} x {group.devices}".removesuffix(" x 1")
                if group.per_machine is not None:
                    slots = f"{group.processes // group.per_machine} x {slots}"
                needed.append(f"{slots} for {group}")
        sizes = Counter(machine.slots for machine in machines)
        available: list[str] = []
        for size, count in sorted(sizes.items(), reverse=True):
            available.append(f"{count} x {size}")
        total = sum(machine.slots for machine in machines)
        return (
            f"the run needs {self.slots} {self._devices} ({' + '.join(needed)}; machines x "
            f"{self._devices}), and the cluster has {total} "
            f"({' + '.join(available) or 'no machine'}). {wants}"
            "Roles can share devices: --train.colocate_all, --train.colocate_actor_ref, "
            "--train.colocate_critic_reward. `ray start` adds machines to the cluster."
        )

    def describe(self, places: Places) -> str:
        """Return the plan as one line per group: roles, processes, devices and machines."""
        lines: list[str] = []
        for group in self.groups:
            line = f"{group}: {group.processes} process(es)"
            if group.devices > 1:
                line += f", {group.devices} {self._devices} each"
            counts = Counter(machine.name for machine in places[group.name])
            line += ": " + ", ".join(f"{count} on {name}" for name, count in counts.items())
            if group.shares:
                line += f", on devices of {group.shares.replace('+', ', ')}"
            lines.append(line)
        return "\n".join(lines)


def _fillings(
    groups: Sequence[HostGroup], machines: Sequence[Machine]
) -> Iterator[dict[str, list[int]]]:
    """Yield every way to place the groups: group name → machine index of each process."""
    if not groups:
        yield {}
        return
    group, *rest = groups
    for processes in _choices(group, machines):
        left = [machine.without(group, processes[index]) for index, machine in enumerate(machines)]
        for others in _fillings(rest, left):
            yield {group.name: sorted(processes.elements())} | others


def _choices(group: HostGroup, machines: Sequence[Machine]) -> Iterator[Counter[int]]:
    """Yield every way to place one group: machine index → number of processes.

    Interchangeable machines count as one.
    """
    # Keep machines of one kind adjacent, so that `_selections` yields no selection twice.
    fullest_first = sorted(
        range(len(machines)), key=lambda index: (machines[index].slots, machines[index].kind)
    )
    per_machine = group.per_machine
    if per_machine is None:  # these groups are placed last, so one way to place them is enough
        processes = Counter[int]()
        for index in fullest_first:
            processes[index] = min(machines[index].room(group), group.processes - processes.total())
        if processes.total() == group.processes:
            yield processes
        return
    fitting = [index for index in fullest_first if machines[index].room(group) >= per_machine]
    for chosen in _selections(fitting, machines, group.processes // per_machine):
        yield Counter(dict.fromkeys(chosen, per_machine))


def _selections(
    indices: Sequence[int], machines: Sequence[Machine], number: int
) -> Iterator[list[int]]:
    """Yield every way to select `number` of the machines at these indices."""
    if not number:
        yield []
        return
    tried: set[str] = set()
    for position, index in enumerate(indices[: len(indices) - number + 1]):
        kind = machines[index].kind
        if kind not in tried:
            tried.add(kind)
            for others in _selections(indices[position + 1 :], machines, number - 1):
                yield [index, *others]


class Slots:
    """A host group's slots, reserved in Ray: one bundle per process, on the planned machine."""

    def __init__(self, group: HostGroup, machines: Sequence[Machine], *, on_gpus: bool) -> None:
        self.group = group
        self.machine = machines[0]
        self.on_gpus = on_gpus
        bundle = {"CPU": CPU_PER_SLOT * group.devices}
        if on_gpus:
            bundle["GPU"] = float(group.devices)
        bundle |= group.amounts
        self._bundles: PlacementGroup = placement_group(
            [bundle] * len(machines),
            strategy="PACK",
            bundle_label_selector=[{NODE_ID: machine.id} for machine in machines],
        )

    def wait(self, timeout_s: float) -> None:
        """Wait until Ray has reserved the slots. Raises PlacementError after `timeout_s`."""
        if not self._bundles.wait(timeout_s):
            raise PlacementError(
                f"Ray did not reserve {self._bundles.bundle_count} × "
                f"{self._bundles.bundle_specs[0]} for {self.group.name} within {timeout_s:g} s "
                f"(free now: {ray.available_resources()}). Other jobs may hold the devices; check "
                "`ray status`, or raise --train.setup_timeout."
            )

    def options(self, process: int, *, owner: bool = True) -> dict[str, Any]:
        """Return Ray options for an actor on a process's slots.

        An actor that is not the `owner` of the slots uses another actor's devices.
        """
        devices = self.group.devices if owner else 0
        return {
            "num_cpus": CPU_PER_SLOT * devices,
            "num_gpus": devices if self.on_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._bundles, placement_group_bundle_index=process
            ),
        }

    def release(self) -> None:
        """Release the slots."""
        ray.util.remove_placement_group(self._bundles)
