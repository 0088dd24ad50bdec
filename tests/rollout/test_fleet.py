"""Tests that a fleet restarts lost engines, with fake processes, devices and Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.cluster.placement import HostGroup, Machine
from openrlhf.rollout import fleet as module
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.engine import EngineDied
from openrlhf.rollout.fleet import Fleet, Member

HERE = Machine(name="here", slots=4, id="1")


class Slots:
    """Fake placement slots on a machine."""

    machine = HERE

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.is_released = False

    def wait(self, timeout_s: float) -> None:
        self.free.wait(timeout_s)

    def release(self) -> None:
        self.is_released = True


class Unstable(Fleet):
    """A fleet whose engines start immediately, and whose first cluster queries fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, unanswered: int) -> None:
        monkeypatch.setattr(module.tempfile, "mkdtemp", lambda **_: "")
        super().__init__(HostGroup(name="vllm", roles=("vllm",), processes=1), [], on_gpus=False)
        self.unanswered, self.said = unanswered, list[str]()
        self.say, self.timeout_s = self.said.append, 1.0
        self.settings: Any = SimpleNamespace(vllm=SimpleNamespace(max_restarts=2))
        self.launched: list[int] = []  # indices of the engines whose process was started
        slots: Any = Slots()
        self.member = self._members[0] = Member(
            index=0, slots=slots, actor=object(), log="vllm-0.log", up=True
        )
        monkeypatch.setattr(module, "machines", self.machines)
        monkeypatch.setattr(module.ray, "kill", lambda _: None)
        monkeypatch.setattr(module, "wait_for", lambda *_, **__: [])

    def machines(self, on_gpus: bool, *, free: bool = False) -> list[Machine]:
        self.unanswered -= 1
        if self.unanswered >= 0:
            raise ConnectionError("the cluster did not answer")
        return [HERE]

    def _launch(self, member: Member) -> None:
        self.launched.append(member.index)

    def _load(self, member: Member) -> Any: ...

    def lose_and_wait(self) -> None:
        self.lose(self.member, self.member.actor, EngineDied("gone"))
        deadline = time.monotonic() + 10.0
        while not (self.member.up or self._failure):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


def test_engine_restart_is_retried_if_the_cluster_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Unstable(monkeypatch, unanswered=1)
    fleet.lose_and_wait()
    first, second, last = fleet.said
    for number, reason, notice in ((1, "gone", first), (2, "the cluster did not answer", second)):
        assert notice.startswith("Engine 0 was lost")
        for fact in (reason, f"{number} of 2", "vllm-0.log"):
            assert fact in notice
    assert last.startswith("Engine 0 is up after")


def test_fleet_fails_after_max_restarts_if_the_cluster_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Unstable(monkeypatch, unanswered=9)
    fleet.lose_and_wait()
    with pytest.raises(RolloutError, match=r"--vllm\.max_restarts 2.*the cluster did not answer"):
        fleet.check()


def test_engine_lost_right_after_its_refit_does_not_count_as_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Unstable(monkeypatch, unanswered=0)

    def refit(member: Member) -> None:
        member.up = True
        fleet.lose(member, member.actor, EngineDied("gone again"))

    fleet.refit = refit
    fleet.lose_and_wait()
    for thread in threading.enumerate():
        if thread.name.startswith("restart-"):
            thread.join()
    with pytest.raises(RolloutError, match="gone again"):
        fleet.check()
    assert fleet.up == []


def test_sample_is_requested_from_an_engine_even_if_it_leaves_the_fleet_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request then fails, and another engine generates the sample."""
    fleet = Unstable(monkeypatch, unanswered=0)

    def pick(key: Any, samples: int, *, among: list[int]) -> int:
        fleet._leave(fleet.member)
        return among[0]

    monkeypatch.setattr(fleet._router, "pick", pick)
    assert asyncio.run(fleet._pick("prompt", 1)) is fleet.member


def test_fleet_is_watched_while_a_new_engine_starts_and_only_one_engine_joins_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Unstable(monkeypatch, unanswered=0)
    fleet.settings.vllm.max_engines = 3
    slots: Any = Slots()
    slots.free.clear()
    fleet.timeout_s = 60.0
    assert fleet._can_grow
    fleet._join(slots)  # returns although the engine's slots are not free yet
    assert [member.index for member in fleet.up] == [0]
    assert not fleet._can_grow
    slots.free.set()
    [joining] = (each for each in threading.enumerate() if each.name.startswith("join-"))
    joining.join()
    assert [member.index for member in fleet.up] == [0, 1]
    assert fleet._can_grow


def test_engine_that_joins_while_the_fleet_closes_is_not_started_and_releases_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Unstable(monkeypatch, unanswered=0)
    slots: Any = Slots()
    monkeypatch.setattr(module.ray, "kill", lambda _: fleet._join(slots))
    fleet.close()
    for thread in threading.enumerate():
        if thread.name.startswith("join-"):
            thread.join()
    assert fleet.launched == []
    assert slots.is_released
