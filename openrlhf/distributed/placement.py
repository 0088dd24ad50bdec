"""The devices of each role: a pure plan from counts to host groups, and Ray placement groups for the plan.

A *device slot* is a GPU on a machine with GPUs, and a process on a machine without. Roles of one group share their
slots: each slot is one process that hosts all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.flags import UserError

# Processes on a CPU mostly wait for each other, so that ten can use one core.
CPU_PER_SLOT = 0.1


class PlacementError(UserError, RuntimeError):
    """The cluster does not have the devices that the flags ask for."""


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """Processes that belong together: one per device slot, each hosting all `roles`."""

    name: str
    roles: tuple[str, ...]
    nodes: int
    slots_per_node: int

    @property
    def slots(self) -> int:
        """Number of processes."""
        return self.nodes * self.slots_per_node


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All host groups of a run. A slot is a GPU if `on_gpus`, otherwise a CPU process."""

    groups: tuple[HostGroup, ...]
    on_gpus: bool

    @property
    def slots(self) -> int:
        """Number of device slots of all groups."""
        return sum(group.slots for group in self.groups)

    def describe(self) -> str:
        """The plan in one line per group."""
        kind = "GPU" if self.on_gpus else "CPU process"
        return "\n".join(
            f"{group.name}: {group.nodes} × {group.slots_per_node} {kind}(s) for {', '.join(group.roles)}"
            for group in self.groups
        )


def plan(
    counts: Mapping[str, tuple[int, int]], *, engines: int, on_gpus: bool, colocated: Sequence[Sequence[str]] = ()
) -> Placement:
    """Host groups from `role -> (nodes, slots per node)`. Roles that `colocated` lists together share their slots.

    Raises PlacementError if roles that share slots ask for different numbers of slots.
    """
    groups: list[HostGroup] = []
    placed: set[str] = set()
    for together in [*colocated, *([role] for role in counts)]:
        roles = tuple(role for role in together if role in counts and role not in placed)
        if not roles:
            continue
        sizes = {counts[role] for role in roles}
        if len(sizes) > 1:
            asked = ", ".join(f"{role} {counts[role][0]} × {counts[role][1]}" for role in roles)
            raise PlacementError(
                f"roles that share devices need equal counts, but the flags ask for {asked} (nodes × devices per node): "
                "set --<role>.num_nodes and --<role>.num_gpus_per_node of them alike"
            )
        nodes, slots = counts[roles[0]]
        groups.append(HostGroup(name="+".join(roles), roles=roles, nodes=nodes, slots_per_node=slots))
        placed.update(roles)
    if engines:
        groups.append(HostGroup(name="vllm", roles=("vllm",), nodes=1, slots_per_node=engines))
    return Placement(groups=tuple(groups), on_gpus=on_gpus)


def check_capacity(placement: Placement, resources: Mapping[str, float]) -> None:
    """Raise PlacementError, with the arithmetic, if the cluster has fewer devices than the plan needs."""
    kind, per_slot = ("GPU", 1.0) if placement.on_gpus else ("CPU", CPU_PER_SLOT)
    needed, there = placement.slots * per_slot, resources.get(kind, 0.0)
    if needed > there:
        terms = " + ".join(f"{group.name} {group.slots}" for group in placement.groups)
        flags = dict.fromkeys(map(_flag, placement.groups))
        raise PlacementError(
            f"the run needs {needed:g} {kind}s ({terms} = {placement.slots} slots of {per_slot:g}), "
            f"but Ray's cluster has {there:g}. Lower {' or '.join(flags)}, let trained "
            "roles share devices (--train.colocate_actor_ref, --train.colocate_critic_reward), or add nodes with `ray start`."
        )


def _flag(group: HostGroup) -> str:
    """The flag that sets the number of slots of a group."""
    role = "ref" if group.roles[0] == "teacher" else group.roles[0]  # a teacher is as large as the reference
    return "--vllm.num_engines" if role == "vllm" else f"--{role}.num_gpus_per_node"


def reserve(group: HostGroup, *, on_gpus: bool) -> PlacementGroup:
    """Ask Ray for one bundle per slot."""
    bundle = {"GPU": 1.0, "CPU": CPU_PER_SLOT} if on_gpus else {"CPU": CPU_PER_SLOT}
    return placement_group([dict(bundle) for _ in range(group.slots)], strategy="PACK")


def await_reserved(reserved: PlacementGroup, name: str, *, timeout_s: float) -> None:
    """Return when Ray has granted the bundles of the group `name`. Raises PlacementError if it does not in time."""
    if not reserved.wait(timeout_s):
        raise PlacementError(
            f"Ray did not reserve {reserved.bundle_count} × {reserved.bundle_specs[0]} for {name} within {timeout_s:g} s "
            f"(free now: {ray.available_resources()}). Other jobs may hold the devices; see `ray status`, or raise "
            "--train.setup_timeout."
        )


def actor_options(reserved: PlacementGroup, index: int, *, on_gpus: bool) -> dict[str, Any]:
    """Ray options that put an actor on bundle `index`."""
    return {
        "num_cpus": CPU_PER_SLOT,
        "num_gpus": 1 if on_gpus else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=index),
    }
