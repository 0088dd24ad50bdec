"""Hosts of agents when things go wrong: deadlines, lost hosts, threads that hang, and the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents import pool as pool_module
from openrlhf.agents.pool import AgentPool, AgentSettings, Episode, EpisodeError, Generate
from openrlhf.processes.host import HostError
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trajectory import Failure
from tests.tiny import character_tokenizer

FILE = Path(__file__).parent / "agent_files/stubborn.py"


def after(seconds: float) -> Generate:
    """An engine that takes so long for a sample."""

    async def generate(turn: int, tokens: list[int], params: SamplingParams) -> Generation:
        await asyncio.sleep(seconds)
        return Generation(
            tokens=[4, 1], logprobs=[-1.0, -1.0], finish_reason="stop", stop_reason=None, weight_versions=(1,)
        )

    return generate


class Stand:
    """A pool of one host on an event loop of its own."""

    def __init__(self, logs: Path, **changes: Any) -> None:
        limits = {"max_length": 64, "max_turns": None, "step_timeout": 1.5, "episode_timeout": 4.0}
        settings = AgentSettings(**{**limits, "path": str(FILE), "workers": 1, "memory_gib": 2.0, **changes})
        self.runner = asyncio.Runner()
        self.pool = AgentPool(settings, character_tokenizer(), log_dir=logs)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def play(self, label: str, seconds: float = 0.0) -> Any:
        """The logs of an episode, or its error; the engine takes `seconds` for a sample."""
        params = SamplingParams(logprobs=1)
        try:
            result, _ = await self.pool.run(Episode(prompt="1+", label=label, params=params, generate=after(seconds)))
        except HostError as error:
            return error
        return result["extra_logs"]

    def close(self) -> None:
        self.do(self.pool.close())
        self.runner.close()


@pytest.fixture
def stand(shared: Stand) -> Stand:
    return shared


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "GRACE_S", 0.5)
        stand = Stand(tmp_path_factory.mktemp("logs"))
        yield stand
        stand.close()


def test_an_exception_with_a_failure_of_its_own_is_an_exception(stand: Stand) -> None:
    failed = stand.do(stand.play("odd error"))
    assert isinstance(failed, EpisodeError) and failed.failure is Failure.EXCEPTION
    assert "OddError: no such square" in str(failed)


def test_an_agent_that_cancels_itself_has_not_run_out_of_time(stand: Stand) -> None:
    assert stand.do(stand.play("cancels itself")).failure is Failure.EXCEPTION


@pytest.mark.parametrize("how", ["exits", "exits in a callback"])
def test_episodes_that_exit_at_the_same_time_fail_for_that_and_no_other_does(stand: Stand, how: str) -> None:
    async def together() -> Any:
        return await asyncio.gather(*(stand.play(label, 0.3) for label in [how, "fine"] * 6))

    played = stand.do(together())
    assert [failed.failure for failed in played[::2]] == [Failure.EXIT] * 6
    assert all("pid" in logs for logs in played[1::2])


def test_the_engine_asked_from_another_loop_says_so(stand: Stand) -> None:
    failed = stand.do(stand.play("asks in a thread"))
    assert failed.failure is Failure.EXCEPTION and "await it where execute runs" in str(failed)


def test_more_than_a_host_may_send_fails_its_episode_and_costs_no_host(stand: Stand) -> None:
    before = stand.do(stand.play("fine"))
    failed = stand.do(stand.play("huge"))
    assert failed.failure is Failure.RESULT and "more than the 268,435,456 a host may send" in str(failed)
    assert stand.do(stand.play("fine"))["pid"] == before["pid"]


def test_many_episodes_can_wait_in_threads(stand: Stand) -> None:
    async def together() -> list[Any]:
        return await asyncio.gather(*(stand.play("forty threads") for _ in range(40)))

    assert all("pid" in logs for logs in stand.do(together()))


def test_threads_that_hang_end_with_their_host(stand: Stand) -> None:
    before = stand.do(stand.play("fine"))
    assert stand.do(stand.play("hung thread")).failure is Failure.TIMEOUT
    assert stand.do(stand.play("fine"))["pid"] != before["pid"]


def test_an_episode_that_is_given_up_ends_in_its_host_too(stand: Stand) -> None:
    async def given_up() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stand.play("fine", 1000), 0.5)
        return await stand.play("fine")

    before = stand.do(stand.play("fine"))
    assert stand.do(given_up()) == {**before, "cancelled": before["cancelled"] + 1}


def test_an_episode_that_will_not_end_fails_although_it_waits_for_the_engine(stand: Stand) -> None:
    failed = stand.do(stand.play("asks again", 1000))
    assert failed.failure is Failure.TIMEOUT and "took more than 4 s" in str(failed)


def test_an_episode_that_ends_every_host_while_it_waits_for_the_engine_fails(stand: Stand) -> None:
    failed = stand.do(stand.play("crashes while it asks", 1000))
    assert isinstance(failed, EpisodeError)
    assert failed.failure is Failure.EXIT and "exited with status 7" in str(failed)


def test_an_episode_at_its_own_work_is_not_blamed_for_the_crash_of_one_that_waits(stand: Stand) -> None:
    async def together() -> Any:
        return await asyncio.gather(stand.play("crashes while it asks", 1000), stand.play("works"))

    crashed, working = stand.do(together())
    assert crashed.failure is Failure.EXIT
    assert "pid" in working


def test_an_episode_that_lacked_memory_beside_another_is_played_alone(stand: Stand) -> None:
    async def together() -> tuple[Any, bool]:
        playing = asyncio.gather(stand.play("hoards", 1.5), stand.play("modest"))
        alone = False
        while not playing.done():
            alone |= any(host.running for host in stand.pool._quarantine)
            await asyncio.sleep(0.05)
        return await playing, alone

    played, alone = stand.do(together())
    assert alone
    assert all("pid" in logs for logs in played)


def test_episodes_played_alone_are_played_at_the_same_time(stand: Stand) -> None:
    """One that ends its host takes the others there into quarantine, which has several hosts."""

    async def together() -> tuple[Any, int]:
        playing = asyncio.gather(stand.play("exits in a callback"), *(stand.play("works", 1.0) for _ in range(8)))
        most = 0
        while not playing.done():
            most = max(most, sum(bool(host.running) for host in stand.pool._quarantine))
            await asyncio.sleep(0.05)
        return await playing, most

    (exited, *others), most = stand.do(together())
    assert exited.failure is Failure.EXIT
    assert all("pid" in logs for logs in others)
    assert most > 1


def test_a_late_episode_does_not_end_the_host_that_follows_its_own(stand: Stand) -> None:
    async def together() -> Any:
        return await asyncio.gather(stand.play("block", 0.2), stand.play("fine", 0.6), stand.play("fine", 3.0))

    blocked, *others = stand.do(together())
    assert blocked.failure is Failure.TIMEOUT
    assert all("pid" in logs for logs in others)


async def starting(stand: Stand) -> tuple[asyncio.Task[Any], int]:
    """An episode whose host is starting, and the host's process."""
    episode = asyncio.create_task(stand.play("fine"))
    [host] = stand.pool._hosts
    while not hasattr(host, "process"):
        await asyncio.sleep(0)
    return episode, host.process.pid


def test_a_host_that_dies_while_it_starts_is_replaced(tmp_path: Path) -> None:
    async def killed() -> Any:
        episode, pid = await starting(stand)
        os.kill(pid, signal.SIGKILL)
        return await episode

    stand = Stand(tmp_path)
    assert "pid" in stand.do(killed())
    stand.close()


def test_after_the_end_no_host_is_started_for_episodes_under_way(tmp_path: Path) -> None:
    async def ended() -> Any:
        waiting = asyncio.create_task(stand.play("fine", 1000))
        while not any(running.samples for host in stand.pool._hosts for running in host.running.values()):
            await asyncio.sleep(0.01)
        pid = stand.pool._hosts[0].process.pid
        await stand.pool.close()
        return await waiting, await stand.play("fine"), pid

    stand = Stand(tmp_path)
    *errors, pid = stand.do(ended())
    assert [str(error) for error in errors] == ["the hosts of agents were closed"] * 2
    assert stand.pool._hosts[0].process.pid == pid
    stand.runner.close()


def test_the_end_does_not_wait_for_a_host_that_is_starting(tmp_path: Path) -> None:
    async def ended() -> Any:
        episode, _ = await starting(stand)
        await stand.pool.close()
        return await episode

    file = tmp_path / "slow.py"
    file.write_text("import time; time.sleep(1000)")
    stand = Stand(tmp_path, path=str(file), load_timeout=20)
    assert str(stand.do(ended())) == "the hosts of agents were closed"
    stand.runner.close()
