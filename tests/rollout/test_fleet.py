"""A fleet whose processes, devices and Ray are made by hand: an engine that could not be started
again at once.
"""

from __future__ import annotations

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
    """Slots of a machine."""

    machine = HERE

    def wait(self, timeout_s: float) -> None: ...
    def release(self) -> None: ...


class Unstable(Fleet):
    """Starts its engines at once. Each of the first questions about the cluster has no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, unanswered: int) -> None:
        monkeypatch.setattr(module.tempfile, "mkdtemp", lambda **_: "")
        super().__init__(HostGroup(name="vllm", roles=("vllm",), per_node=1), [], on_gpus=False)
        self.unanswered, self.said = unanswered, list[str]()
        self.say, self.timeout_s = self.said.append, 1.0
        self.settings: Any = SimpleNamespace(vllm=SimpleNamespace(max_restarts=2))
        slots: Any = Slots()
        self.member = self._members[0] = Member(
            index=0, slots=slots, actor=object(), log="vllm-0.log", up=True
        )
        monkeypatch.setattr(module, "machines", self.machines)
        monkeypatch.setattr(module.ray, "kill", lambda _: None)
        monkeypatch.setattr(module, "gather", lambda *_, **__: [])

    def machines(self, on_gpus: bool, *, free: bool = False) -> list[Machine]:
        self.unanswered -= 1
        if self.unanswered >= 0:
            raise ConnectionError("the state of the cluster is not known")
        return [HERE]

    def _begun(self, member: Member) -> Member:
        return member

    def _started(self, member: Member) -> Any:
        return None

    def lose_and_wait(self) -> None:
        self.lose(self.member, self.member.actor, EngineDied("gone"))
        deadline = time.monotonic() + 10.0
        while not (self.member.up or self._failure):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


def test_an_engine_is_started_again_although_the_cluster_did_not_answer_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Unstable(monkeypatch, unanswered=1)
    fleet.lose_and_wait()
    assert fleet.said[:2] == [
        "Engine 0 was lost (gone). Restart 1 of 2; its log: vllm-0.log",
        "Engine 0 was lost (the state of the cluster is not known). Restart 2 of 2; its log: vllm-0.log",
    ]
    assert fleet.said[2].startswith("Engine 0 serves again after")


def test_a_cluster_that_never_answers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Unstable(monkeypatch, unanswered=9)
    fleet.lose_and_wait()
    with pytest.raises(
        RolloutError, match=r"lost after 2 restart.*: the state of the cluster is not known"
    ):
        fleet.check()
