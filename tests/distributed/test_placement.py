"""The plan of who gets which devices, and what is said where there are too few."""

from __future__ import annotations

import re

import pytest

from openrlhf.distributed.placement import Placement, PlacementError, check_capacity, plan

ROLES = {"actor": (2, 4), "critic": (1, 2), "ref": (2, 4), "reward": (1, 2)}


def groups(placement: Placement) -> dict[str, tuple[tuple[str, ...], int]]:
    """Roles and slots of each group, by its name."""
    return {group.name: (group.roles, group.slots) for group in placement.groups}


def test_roles_have_devices_of_their_own_unless_they_are_joined() -> None:
    assert groups(plan(ROLES, engines=3, on_gpus=True)) == {
        "actor": (("actor",), 8),
        "critic": (("critic",), 2),
        "ref": (("ref",), 8),
        "reward": (("reward",), 2),
        "vllm": (("vllm",), 3),
    }
    joined = plan(ROLES, engines=3, on_gpus=True, colocated=[("actor", "ref"), ("critic", "reward")])
    assert groups(joined) == {
        "actor+ref": (("actor", "ref"), 8),
        "critic+reward": (("critic", "reward"), 2),
        "vllm": (("vllm",), 3),
    }
    assert joined.slots == 13
    assert "critic+reward" in [group.name for group in joined.groups]


def test_joining_a_role_that_the_run_does_not_have_changes_nothing() -> None:
    alone = plan({"actor": (1, 1)}, engines=1, on_gpus=False, colocated=[("actor", "ref")])
    assert groups(alone) == {"actor": (("actor",), 1), "vllm": (("vllm",), 1)}


def test_roles_that_share_devices_have_equally_many() -> None:
    with pytest.raises(PlacementError, match=re.escape("the flags ask for actor 2 × 4, critic 1 × 2")):
        plan(ROLES, engines=0, on_gpus=True, colocated=[("actor", "critic")])


def test_too_few_devices_are_reported_with_the_sum_and_the_flags_that_make_it() -> None:
    placement = plan(ROLES, engines=3, on_gpus=True, colocated=[("actor", "ref"), ("critic", "reward")])
    check_capacity(placement, {"GPU": 13.0, "CPU": 1.0})
    with pytest.raises(PlacementError) as error:
        check_capacity(placement, {"GPU": 12.0, "CPU": 64.0})
    assert "needs 13 GPUs (actor+ref 8 + critic+reward 2 + vllm 3 = 13 slots of 1), but Ray's cluster has 12" in str(
        error.value
    )
    assert "Lower --actor.num_gpus_per_node or --critic.num_gpus_per_node or --vllm.num_engines," in str(error.value)


def test_a_teachers_devices_are_counted_by_the_flag_of_the_reference() -> None:
    placement = plan({"actor": (1, 1), "teacher": (1, 2)}, engines=1, on_gpus=True)
    with pytest.raises(PlacementError, match=r"Lower --actor.num_gpus_per_node or --ref.num_gpus_per_node or --vllm"):
        check_capacity(placement, {"GPU": 2.0})


def test_ten_processes_share_a_cpu_core() -> None:
    placement = plan({"actor": (1, 4)}, engines=6, on_gpus=False)
    check_capacity(placement, {"CPU": 1.0})
    with pytest.raises(PlacementError, match=r"needs 1 CPUs \(actor 4 \+ vllm 6 = 10 slots of 0\.1\)"):
        check_capacity(placement, {"CPU": 0.5})
