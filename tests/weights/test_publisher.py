"""Tests of the publisher's calls, their order, and its failure handling, with fake processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from openrlhf.rollout.engine import RolloutEngine
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.publisher import EngineCalls, PolicyCalls, WeightPublisher
from openrlhf.weights.transport import Transport, WeightGroup
from openrlhf.workers.policy import PolicyWorker

MANIFEST = WeightManifest(version=7, specs=(), bucket_bytes=1)
ANSWERS = {"weight_address": ("trainer", 29500), "weight_manifest": MANIFEST}


@pytest.fixture(autouse=True)
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of abandoned groups, whose stores do not exist here."""
    names: list[str] = []
    monkeypatch.setattr(
        "openrlhf.weights.publisher.abandon", lambda group: names.append(group.name)
    )
    return names


class ProcessLost(Exception):
    """The error for a dead process in the fake cluster."""


@dataclass
class Processes:
    """A fake for all processes of a run, which records each call and makes it return or fail."""

    calls: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, Exception] = field(
        default_factory=dict
    )  # names of the calls, in order of arrival
    busy_s: float = 0.0  # time until the policy finishes a running update

    def call(self, name: str, *args: Any, **kwargs: Any) -> str:
        self.calls.append(name)
        self.arguments[name] = (args, kwargs)
        return name

    def wait_for(
        self, calls: Sequence[str], *, timeout_s: float, doing: str, flag: str = ""
    ) -> list[Any]:
        self.calls.append(f"wait: {doing}")
        if any(call.startswith("rank") for call in calls):
            if timeout_s < self.busy_s:
                raise ProcessLost(f"did not {doing} within {timeout_s:g} s ({flag})")
            self.busy_s = 0.0
        for name, failure in self.failures.items():
            if name in calls:
                raise failure
        return [ANSWERS.get(name.partition(" ")[2]) for name in calls]


@dataclass
class Policy:
    processes: Processes
    ranks: int = 2

    def broadcast(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [
            self.processes.call(f"rank{rank} {method.__name__}", *args)
            for rank in range(self.ranks)
        ]


@dataclass(eq=False)
class Engine:
    processes: Processes
    index: int
    up: bool = True

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        return self.processes.call(f"engine{self.index} {method.__name__}", *args, **kwargs)


@dataclass
class Fleet:
    members: list[Engine]
    lost_next: list[Engine] = field(default_factory=list)
    workers_per_engine: int = 2
    restarts: bool = True  # False: a lost engine ends the run

    @property
    def up(self) -> list[Engine]:
        return [member for member in self.members if member.up]

    def find_lost(self) -> None:
        for member in self.lost_next:
            member.up = False
            member.processes.failures.clear()

    def check(self) -> None:
        if not self.restarts and not self.up:
            raise ProcessLost("no engine is left")


@dataclass
class Run:
    processes: Processes
    fleet: Fleet
    publisher: WeightPublisher

    def group(self) -> WeightGroup:
        """Return the most recent weight group."""
        return self.processes.arguments["rank0 join_weight_group"][0][0]


def new_run(*, engines: int = 2, transport: Transport = "gloo") -> Run:
    processes = Processes()
    fleet = Fleet([Engine(processes, index) for index in range(engines)])
    publisher = WeightPublisher(
        Policy(processes),
        fleet,
        transport=transport,
        timeout_s=60.0,
        update_timeout_s=600.0,
        wait_for=processes.wait_for,
        failures=(ProcessLost,),
    )
    return Run(processes, fleet, publisher)


@pytest.mark.parametrize(
    ("calls", "worker"), [(PolicyCalls, PolicyWorker), (EngineCalls, RolloutEngine)]
)
def test_workers_implement_all_calls_of_the_publisher(calls: type, worker: type) -> None:
    for name, method in vars(calls).items():
        if not name.startswith("_"):
            implemented = [
                parameter
                for parameter in inspect.signature(getattr(worker, name)).parameters
                if not parameter.startswith("_ray")  # Ray adds a parameter to actor methods
            ]
            assert implemented == list(inspect.signature(method).parameters), name


def test_first_publication_forms_a_group_then_sends_then_resumes() -> None:
    run = new_run()
    run.publisher.publish(7)
    assert run.processes.calls == [
        "rank0 weight_address",
        "rank1 weight_address",
        "wait: report its address for sending weights",
        "engine0 join",
        "engine1 join",
        "rank0 join_weight_group",
        "rank1 join_weight_group",
        "wait: join the weight group",
        "rank0 weight_manifest",
        "rank1 weight_manifest",
        "wait: list its weights",
        "engine0 receive",
        "engine1 receive",
        "rank0 send_weights",
        "rank1 send_weights",
        "wait: publish weight version 7",
        "engine0 resume",
        "engine1 resume",
        "wait: serve the new weights",
    ]
    assert run.processes.arguments["rank0 weight_manifest"] == ((7,), {})


def test_second_publication_reuses_the_first_group() -> None:
    run = new_run()
    run.publisher.publish(7)
    run.processes.calls.clear()
    run.publisher.publish(8)
    assert run.processes.calls[0] == "rank0 weight_manifest"
    assert run.publisher.groups_made == 1


def test_broadcast_group_contains_sender_rank_0_and_every_engine_worker() -> None:
    run = new_run()
    run.publisher.publish(7)
    group = run.group()
    assert (group.senders, group.world_size) == ((0,), 5)
    assert (group.host, group.port, group.name) == ("trainer", 29500, "weights-1")
    offsets = [run.processes.arguments[f"engine{i} join"][1]["rank_offset"] for i in (0, 1)]
    assert offsets == [1, 3]


def test_ipc_group_has_a_sender_on_the_gpu_of_every_engine_worker() -> None:
    run = new_run(transport="ipc")
    run.fleet.members[0].up = False
    run.publisher.publish(7)
    assert (run.group().senders, run.group().world_size) == ((2, 3), 4)
    assert run.processes.arguments["engine1 join"][1] == {"rank_offset": 2}


def test_refit_sends_the_current_version_to_one_engine_in_a_new_group() -> None:
    run = new_run()
    run.publisher.publish(7)
    restarted = run.fleet.members[1]
    restarted.up = False
    run.processes.calls.clear()
    run.publisher.refit(restarted)
    assert restarted.up
    assert run.processes.arguments["rank0 weight_manifest"] == ((7,), {})
    assert not [call for call in run.processes.calls if call.startswith("engine0")]
    assert run.group().name == "weights-2"


@pytest.mark.parametrize("engines", [1, 2])
def test_restarted_engine_joins_a_new_group_even_if_it_was_alone_in_the_last_group(
    engines: int,
) -> None:
    """A restarted engine has a new process, but is still the same member of the fleet."""
    run = new_run(engines=engines)
    run.publisher.publish(7)
    restarted = run.fleet.members[-1]
    for _ in range(2):  # two deaths without a publication in between
        restarted.up = False
        run.processes.calls.clear()
        run.publisher.refit(restarted)
        joined = [call for call in run.processes.calls if call.endswith(" join")]
        assert joined == [f"engine{restarted.index} join"]
    assert run.group().name == "weights-3"


@pytest.mark.parametrize("call", ["join", "receive", "resume"])
def test_publication_is_repeated_for_the_remaining_engines_after_one_is_lost(
    call: str, abandoned: list[str]
) -> None:
    run = new_run()
    run.processes.failures[f"engine0 {call}"] = ProcessLost("engine 0")
    run.fleet.lost_next = run.fleet.members[:1]
    run.publisher.publish(7)
    assert abandoned == ["weights-1"]
    assert run.publisher.connected == run.fleet.members[1:]
    assert run.group().name == "weights-2"
    assert ("engine0 resume" in run.processes.calls) == (call == "resume")


def test_refit_waits_for_a_running_update_longer_than_for_a_publication() -> None:
    run = new_run()
    restarted = run.fleet.members[1]
    restarted.up = False
    run.processes.busy_s = 300.0
    run.publisher.refit(restarted)
    assert restarted.up
    run.processes.busy_s = 1000.0
    with pytest.raises(ProcessLost, match=r"update .*within 600 s \(--train\.step_timeout\)"):
        run.publisher.refit(restarted)


def test_failed_refit_abandons_its_group(abandoned: list[str]) -> None:
    run = new_run()
    restarted = run.fleet.members[1]
    restarted.up = False
    run.processes.failures["engine1 join"] = ProcessLost("engine 1")
    with pytest.raises(ProcessLost):
        run.publisher.refit(restarted)
    assert abandoned == ["weights-1"]
    assert not restarted.up


def test_publication_raises_the_fleets_error_if_the_last_engine_is_lost() -> None:
    run = new_run(engines=1)
    run.processes.failures["engine0 receive"] = ProcessLost("engine 0")
    run.fleet.lost_next = run.fleet.members
    run.fleet.restarts = False
    with pytest.raises(ProcessLost, match="no engine is left"):
        run.publisher.publish(7)


def test_failed_publication_without_a_lost_engine_raises_the_error_with_engine_reports() -> None:
    run = new_run(engines=3)
    run.processes.failures = {
        "rank0 send_weights": PublicationError("a member died"),
        "engine1 receive": PublicationError("engine 1: out of memory"),
        "engine2 receive": ProcessLost("engine 2"),
    }
    with pytest.raises(PublicationError) as raised:
        run.publisher.publish(7)
    assert str(raised.value) == "a member died; engine 1: out of memory"
    assert not [call for call in run.processes.calls if call.endswith("resume")]


def test_lost_sender_takes_precedence_over_the_publication_error() -> None:
    run = new_run()
    run.publisher.publish(7)
    run.processes.failures = {
        "rank0 send_weights": PublicationError("a member died"),
        "rank0 weight_address": ProcessLost("rank 0"),
    }
    with pytest.raises(ProcessLost, match="rank 0"):
        run.publisher.publish(8)


def test_check_runs_only_after_the_first_publication() -> None:
    run = new_run()
    checked: list[int] = []
    run.publisher.check = lambda: checked.append(len(run.processes.calls))
    run.publisher.publish(7)
    calls_of_first = len(run.processes.calls)
    run.publisher.publish(8)
    assert checked == [calls_of_first]


def test_check_is_repeated_for_the_remaining_engines_after_one_is_lost() -> None:
    run = new_run()
    run.fleet.lost_next = run.fleet.members[:1]
    checked: list[int] = []

    def check() -> None:
        checked.append(len(run.fleet.up))
        if len(checked) == 1:
            raise ProcessLost("engine 0")

    run.publisher.check = check
    run.publisher.publish(7)
    assert checked == [2, 1] and run.publisher.check is None
    assert run.processes.calls[-2:] == ["engine1 resume", "wait: serve the new weights"]


def test_failed_check_without_a_lost_engine_raises() -> None:
    run = new_run()

    def check() -> None:
        raise PublicationError("they compute different log-probabilities")

    run.publisher.check = check
    with pytest.raises(PublicationError, match="different log-probabilities"):
        run.publisher.publish(7)


def test_refit_announces_the_version_published_while_all_engines_were_down() -> None:
    """A resumed run publishes its step before its first update."""
    run = new_run(engines=1)
    [engine] = run.fleet.members
    engine.up = False
    run.publisher.publish(5)
    assert run.processes.calls == []
    run.publisher.refit(engine)
    assert run.processes.arguments["rank0 weight_manifest"] == ((5,), {})


def test_publishing_without_engines_makes_no_calls() -> None:
    run = new_run()
    run.publisher.engines = None
    run.publisher.publish(7)
    assert run.processes.calls == []
