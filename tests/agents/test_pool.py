"""Processes of agents when things go wrong: deadlines, lost processes, threads that hang, and the
end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents import play as play_module
from openrlhf.agents.play import AgentEpisodes
from openrlhf.config.rollout import RolloutConfig, RuleConfig
from openrlhf.core.trajectory import Failure, Prompt
from openrlhf.rollout.generator import Generate, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from tests.tiny import character_tokenizer

FILE = Path(__file__).parent / "agent_files/stubborn.py"
SPEC = SamplingSpec(purpose="train", rollout=RolloutConfig(), max_len=64, seed=None)


def after(seconds: float) -> Generate:
    """An engine that takes so long for a sample."""

    async def generate(
        prompt: Prompt, spec: SamplingSpec, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        await asyncio.sleep(seconds)
        logprobs = [-1.0, -1.0]
        return [
            Generation(
                tokens=[4, 1],
                logprobs=logprobs,
                finish_reason="stop",
                stop_reason=None,
                weight_versions=(1,),
            )
        ]

    return generate


class Stand:
    """Agents in one process, and an event loop."""

    def __init__(self, folder: Path, file: Path = FILE, **changes: Any) -> None:
        limits = RolloutConfig(**{"step_timeout": 60.0, "episode_timeout": 60.0, **changes})
        processes = RuleConfig(workers=1, memory_gib=2.0)
        self.runner, self.folder = asyncio.Runner(), folder
        self.agents = AgentEpisodes(
            str(file),
            character_tokenizer(),
            limits,
            processes,
            max_length=64,
            needs_reward=False,
            log_dir=folder,
        )

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def play(self, label: str, seconds: float = 0.0, generate: Generate | None = None) -> Any:
        """The logs of an episode, or if it failed the episode; the engine takes `seconds` for a
        sample.
        """
        prompt = Prompt(index=0, text=str(self.folder), tokens=[5], label=label)
        [episode] = await self.agents.play(prompt, SPEC, generate or after(seconds))
        return episode if episode.failed else dict(episode.extra_logs)

    def close(self) -> None:
        self.agents.close()
        self.runner.close()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("logs"))
    yield stand
    stand.close()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """With short deadlines, for episodes that miss them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play_module, "GRACE_S", 0.5)
        stand = Stand(tmp_path_factory.mktemp("logs"), step_timeout=1.5, episode_timeout=8.0)
    yield stand
    stand.close()


def test_an_exception_with_a_failure_of_its_own_is_an_exception(stand: Stand) -> None:
    failed = stand.do(stand.play("odd error"))
    assert failed.failure is Failure.EXCEPTION
    assert "OddError: no such square" in failed.error


def test_an_agent_that_cancels_itself_has_not_run_out_of_time(stand: Stand) -> None:
    assert stand.do(stand.play("cancels itself")).failure is Failure.EXCEPTION


@pytest.mark.parametrize("how", ["exits", "exits in a callback"])
def test_episodes_that_exit_at_the_same_time_fail_for_that_and_no_other_does(
    stand: Stand, how: str
) -> None:
    async def together() -> Any:
        return await asyncio.gather(*(stand.play(label, 0.3) for label in [how, "fine"] * 3))

    played = stand.do(together())
    assert [failed.failure for failed in played[::2]] == [Failure.EXIT] * 3
    assert all("pid" in logs for logs in played[1::2])


def test_the_engine_may_be_asked_from_a_threads_own_event_loop(stand: Stand) -> None:
    assert "pid" in stand.do(stand.play("asks in a thread"))


def test_more_than_may_be_sent_fails_its_episode_and_costs_no_process(stand: Stand) -> None:
    before = stand.do(stand.play("fine"))
    failed = stand.do(stand.play("huge"))
    assert (
        failed.failure is Failure.RESULT
        and "more than the 67,108,864 that may be sent" in failed.error
    )
    assert stand.do(stand.play("fine"))["pid"] == before["pid"]


def test_many_episodes_can_wait_in_threads(stand: Stand) -> None:
    async def together() -> list[Any]:
        return await asyncio.gather(*(stand.play("forty threads") for _ in range(40)))

    assert all("pid" in logs for logs in stand.do(together()))


def test_threads_that_hang_end_with_their_process(hasty: Stand) -> None:
    before = hasty.do(hasty.play("fine"))
    assert hasty.do(hasty.play("hung thread")).failure is Failure.TIMEOUT
    assert hasty.do(hasty.play("fine"))["pid"] != before["pid"]


def test_an_episode_that_is_given_up_ends_in_its_process_too(stand: Stand) -> None:
    async def given_up() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stand.play("fine", 1000), 1)
        return await stand.play("fine")

    before = stand.do(stand.play("fine"))
    assert stand.do(given_up()) == {**before, "cancelled": before["cancelled"] + 1}


def test_an_episode_that_will_not_end_fails_although_it_waits_for_the_engine(hasty: Stand) -> None:
    failed = hasty.do(hasty.play("asks again", 1000))
    assert (
        failed.failure is Failure.TIMEOUT
        and "took more than 8 s (--rollout.episode_timeout)" in failed.error
    )


def test_an_episode_that_ends_every_process_while_it_waits_for_the_engine_fails(
    stand: Stand,
) -> None:
    failed = stand.do(stand.play("crashes while it asks", 1000))
    assert failed.failure is Failure.EXIT and "exited with status 7" in failed.error


def test_an_episode_at_its_own_work_is_not_blamed_for_the_crash_of_one_that_waits(
    stand: Stand,
) -> None:
    async def together() -> Any:
        return await asyncio.gather(stand.play("crashes while it asks", 1000), stand.play("works"))

    crashed, working = stand.do(together())
    assert crashed.failure is Failure.EXIT
    assert "pid" in working


def test_an_episode_that_lacked_memory_beside_another_is_played_alone(stand: Stand) -> None:
    async def together() -> Any:
        return await asyncio.gather(stand.play("hoards"), stand.play("modest"))

    hoarding, modest = stand.do(together())
    assert hoarding["pid"] != modest["pid"]
    assert "modest" in (stand.folder / "agent-alone-0.log").read_text()


def test_episodes_played_alone_are_played_at_the_same_time(stand: Stand) -> None:
    """If an episode ends its process, the others there run alone, in several processes: four, which
    meet.
    """

    async def together() -> Any:
        return await asyncio.gather(
            *(stand.play(label) for label in ("exits at the meeting", *["meets"] * 4))
        )

    exited, *others = stand.do(together())
    assert exited.failure is Failure.EXIT
    assert len({logs["pid"] for logs in others}) == 4


def test_a_late_episode_ends_no_process_but_its_own(hasty: Stand) -> None:
    async def together() -> Any:
        return await asyncio.gather(
            hasty.play("block", 0.2), hasty.play("fine", 0.6), hasty.play("fine", 3.0)
        )

    blocked, *others = hasty.do(together())
    assert blocked.failure is Failure.TIMEOUT
    assert all("pid" in logs for logs in others)


async def starting(stand: Stand) -> tuple[asyncio.Task[Any], int]:
    """An episode whose process is loading the agent's file, and that process."""
    episode = asyncio.create_task(stand.play("fine"))
    pids = stand.folder / "pids"
    while not (pids.exists() and pids.read_text()):
        await asyncio.sleep(0.01)
    return episode, int(pids.read_text().split()[0])


def loads_slowly(folder: Path, seconds: float) -> Path:
    """An agent's file that notes its process, and takes its time if it is the first."""
    file = folder / "slow.py"
    file.write_text(
        "import os, time\n"
        f"first = not os.path.exists({str(folder / 'pids')!r})\n"
        f"print(os.getpid(), file=open({str(folder / 'pids')!r}, 'a'))\n"
        f"time.sleep({seconds} if first else 0)\n" + FILE.read_text()
    )
    return file


def test_a_process_that_dies_while_it_loads_is_replaced(tmp_path: Path) -> None:
    async def killed() -> Any:
        episode, pid = await starting(stand)
        os.kill(pid, signal.SIGKILL)
        return await episode

    stand = Stand(tmp_path, loads_slowly(tmp_path, 1000))
    assert "pid" in stand.do(killed())
    stand.close()


def test_after_the_end_no_process_is_started_for_episodes_under_way(tmp_path: Path) -> None:
    async def ended() -> Any:
        asked = asyncio.Event()

        async def generate(*_: Any) -> list[Generation]:
            asked.set()
            await asyncio.sleep(1000)
            raise AssertionError

        waiting = asyncio.create_task(stand.play("fine", generate=generate))
        await asked.wait()
        stand.agents.close()
        return await waiting, await stand.play("fine")

    stand = Stand(tmp_path, loads_slowly(tmp_path, 0))
    assert [failed.error for failed in stand.do(ended())] == [
        "the pool of processes was closed"
    ] * 2
    assert len((tmp_path / "pids").read_text().split()) == 1
    stand.runner.close()


def test_the_end_does_not_wait_for_a_process_that_is_loading(tmp_path: Path) -> None:
    async def ended() -> Any:
        episode, _ = await starting(stand)
        stand.agents.close()
        return await episode

    stand = Stand(tmp_path, loads_slowly(tmp_path, 1000))
    assert stand.do(ended()).error == "the pool of processes was closed"
    stand.runner.close()
