"""Tests that compare the placement of processes with the result of an exhaustive search."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.cluster.placement import HostGroup, Machine, Placement, PlacementError, Places

machines = st.lists(
    st.builds(
        Machine,
        name=st.just(""),
        slots=st.integers(0, 5),
        resources=st.sampled_from([{}, {"fast": 1.0}, {"fast": 2.5}]),
        labels=st.sampled_from([{}, {"zone": "a"}]),
    ),
    max_size=3,
).map(lambda found: [replace(machine, name=f"m{place}") for place, machine in enumerate(found)])
wants = st.sampled_from([{}, {}, {"fast": 0.5}, {"zone": "a"}, {"fast": 1.0, "zone": "a"}])


def group(name: str, machines: int | None, processes: int, **more: object) -> HostGroup:
    """Return a group with `processes` processes per machine, or in total if `machines` is None."""
    per_machine = None
    if machines is not None:
        per_machine = processes
        processes *= machines
    return HostGroup(
        name=name,
        roles=(name,),
        processes=processes,
        per_machine=per_machine,
        **more,  # pyright: ignore[reportArgumentType]
    )


plans = st.tuples(
    st.builds(group, st.just("actor"), st.integers(1, 2), st.integers(1, 3), wants=wants),
    st.builds(group, st.just("critic"), st.integers(1, 2), st.integers(1, 2), wants=wants),
    st.builds(
        group, st.just("vllm"), st.none(), st.integers(1, 3), devices=st.integers(1, 2), wants=wants
    ),
).map(lambda groups: Placement(groups=groups, on_gpus=True))


def allowed(plan: Placement, cluster: list[Machine], places: Places) -> bool:
    """Return True if an assignment satisfies every rule; the implementation is not used."""
    used: Counter[str] = Counter()
    fast: Counter[str] = Counter()
    for each in plan.groups:
        on = Counter(machine.name for machine in places[each.name])
        if each.per_machine is not None and set(on.values()) != {each.per_machine}:
            return False
        if on.total() != each.processes:
            return False
        for machine in places[each.name]:
            used[machine.name] += each.devices
            fast[machine.name] += each.wants.get("fast", 0)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if "zone" in each.wants and machine.labels.get("zone") != each.wants["zone"]:
                return False
    return all(
        used[machine.name] <= machine.slots
        and fast[machine.name] <= machine.resources.get("fast", 0)
        for machine in cluster
    )


def any_plan_fits(plan: Placement, cluster: list[Machine]) -> bool:
    """Try every machine for every process, and return True if any assignment is valid."""
    ways = [
        itertools.combinations_with_replacement(cluster, each.processes) for each in plan.groups
    ]
    names = [each.name for each in plan.groups]
    return any(
        allowed(plan, cluster, dict(zip(names, way, strict=True)))
        for way in itertools.product(*map(list, ways))
    )


@settings(max_examples=150, deadline=None)
@given(plans, machines)
def test_placement_is_found_if_and_only_if_one_exists(
    plan: Placement, cluster: list[Machine]
) -> None:
    places = plan.places(cluster)
    assert (places is not None) == any_plan_fits(plan, cluster)
    if places is not None:
        assert allowed(plan, cluster, places)


EIGHT = [Machine(name="a", slots=8), Machine(name="b", slots=8)]


def test_groups_that_fill_whole_machines_leave_the_other_machines_free() -> None:
    plan = Placement(
        groups=(group("critic", 1, 4), group("actor", 1, 8), group("ref", 1, 4)), on_gpus=True
    )
    places = plan.check(EIGHT)
    assert {each.name for each in places["actor"]}.isdisjoint(
        each.name for each in [*places["critic"], *places["ref"]]
    )
    assert plan.check(EIGHT) == places  # the placement is deterministic


def test_engines_share_model_devices_in_order() -> None:
    models = HostGroup(name="actor+ref", roles=("actor", "ref"), processes=8, per_machine=4)
    engines = HostGroup(name="vllm", roles=("vllm",), processes=4, devices=2, shares="actor+ref")
    plan = Placement(groups=(models, engines), on_gpus=True)
    places = plan.check([Machine(name="a", slots=4), Machine(name="b", slots=4)])
    assert plan.slots == 8
    assert [machine.name for machine in places["vllm"]] == ["a", "a", "b", "b"]
    assert plan.describe(places) == (
        "actor, ref: 8 process(es): 4 on a, 4 on b\n"
        "vllm: 4 process(es), 2 GPUs each: 2 on a, 2 on b, on devices of actor, ref"
    )


def test_error_for_an_oversized_plan_names_the_needed_and_the_available_devices() -> None:
    plan = Placement(groups=(group("actor", 2, 8), group("vllm", None, 3, devices=2)), on_gpus=True)
    with pytest.raises(PlacementError) as error:
        plan.check(EIGHT)
    for part in ("22 GPUs", "2 x 8 for actor + 3 x 2 for vllm;", "16 (2 x 8)", "--train.colocate"):
        assert part in str(error.value)


def test_group_on_two_nodes_needs_two_machines() -> None:
    plan = Placement(groups=(group("actor", 2, 4),), on_gpus=True)
    with pytest.raises(PlacementError, match=r"8 GPUs \(2 x 4 for actor;.* 8 \(1 x 8\)"):
        plan.check(EIGHT[:1])


def test_error_names_labels_that_no_machine_has() -> None:
    plan = Placement(groups=(group("actor", 1, 1, wants={"accelerator": "H100"}),), on_gpus=True)
    with pytest.raises(PlacementError, match=r"actor: \{'accelerator': 'H100'\} \(--placement"):
        plan.check(EIGHT)


def test_description_uses_the_plural_for_several_cpu_processes() -> None:
    plan = Placement(groups=(group("vllm", None, 1, devices=2),), on_gpus=False)
    assert plan.describe(plan.check(EIGHT)) == ("vllm: 1 process(es), 2 CPU processes each: 1 on a")


def test_large_cluster_is_planned_quickly() -> None:
    """Machines with equal resources count as one machine; otherwise the search would never end."""
    groups = [group(name, 20, 7) for name in ("actor", "critic", "ref", "reward")]
    plan = Placement(groups=(*groups, group("vllm", None, 300, devices=2)), on_gpus=True)
    cluster = [Machine(name=f"m{place}", slots=8) for place in range(100)]
    assert plan.places(cluster) is None
    assert (
        replace(plan, groups=(*groups, group("vllm", None, 80, devices=1))).places(cluster)
        is not None
    )


def test_cluster_with_two_alternating_kinds_of_machines_is_planned_quickly() -> None:
    plan = Placement(
        groups=(group("actor", 15, 7), group("critic", 15, 7), group("vllm", None, 300)),
        on_gpus=True,
    )
    cluster: list[Machine] = []
    for place in range(40):
        cluster.append(Machine(name=f"m{place}", slots=8, labels={"zone": "ab"[place % 2]}))
    assert plan.places(cluster) is None


def test_error_reports_that_the_cluster_has_no_machines() -> None:
    with pytest.raises(PlacementError, match=r"has 0 \(no machine\)"):
        Placement(groups=(group("actor", 1, 1),), on_gpus=True).check([])
