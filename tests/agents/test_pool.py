"""Agent processes under faults: timeouts, lost processes, hung threads, and closing.

The step timeout is `PATIENCE_S`, but shorter for episodes that are expected to time out.
"""

from __future__ import annotations

import asyncio
import copy
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
PATIENCE_S = 120.0  # longer than it takes to generate a sample on a busy machine
SPEC = SamplingSpec(purpose="train", rollout=RolloutConfig(), max_len=64, seed=None)


def after(seconds: float) -> Generate:
    """Return an engine that takes `seconds` to generate a sample."""

    async def generate(
        prompt: Prompt, spec: SamplingSpec, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        await asyncio.sleep(seconds)
        sample = Generation(
            tokens=[4, 1],
            logprobs=[-1.0, -1.0],
            finish_reason="stop",
            stop_reason=None,
            weight_versions=(1,),
        )
        return [sample]

    return generate


def never(asked: asyncio.Event) -> Generate:
    """Return an engine that never responds. The engine's first request sets `asked`."""

    async def generate(*_: Any) -> list[Generation]:
        asked.set()
        await asyncio.sleep(1000)
        raise AssertionError

    return generate


class Stand:
    """Agents that share one process, plus an event loop."""

    def __init__(self, folder: Path, file: Path = FILE) -> None:
        limits = RolloutConfig(step_timeout=PATIENCE_S, episode_timeout=2 * PATIENCE_S)
        processes = RuleConfig(workers=1, memory_gib=2.0)
        self.runner = asyncio.Runner()
        self.folder = folder
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

    async def play(
        self,
        label: str,
        seconds: float = 0.0,
        generate: Generate | None = None,
        *,
        step_timeout: float = PATIENCE_S,
        episode_timeout: float = 2 * PATIENCE_S,
    ) -> Any:
        """Run an episode with `generate`, or with an engine that takes `seconds` per sample.

        Returns the logs of a successful episode, or the failed episode itself.
        """
        agents = copy.copy(self.agents)  # shares the processes but has its own time limits
        agents.rollout = RolloutConfig(step_timeout=step_timeout, episode_timeout=episode_timeout)
        prompt = Prompt(index=0, text=str(self.folder), tokens=[5], label=label)
        [episode] = await agents.play(prompt, SPEC, generate or after(seconds))
        if episode.failed:
            return episode
        return dict(episode.extra_logs)

    def close(self) -> None:
        self.agents.close()
        self.runner.close()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("logs"))
    yield stand
    stand.close()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Return an agent pool that gives a cancelled episode half a second to exit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play_module, "CANCELLATION_GRACE_S", 0.5)
        stand = Stand(tmp_path_factory.mktemp("logs"))
    yield stand
    stand.close()


def test_exception_with_an_unrelated_failure_attribute_counts_as_an_exception(stand: Stand) -> None:
    failed = stand.do(stand.play("odd error"))
    assert failed.failure is Failure.EXCEPTION
    assert "OddError: no such square" in failed.error


def test_agent_that_cancels_itself_fails_with_an_exception_instead_of_a_timeout(
    stand: Stand,
) -> None:
    assert stand.do(stand.play("cancels itself")).failure is Failure.EXCEPTION


@pytest.mark.parametrize("how", ["exits", "exits in a callback"])
def test_episodes_that_exit_simultaneously_fail_without_affecting_other_episodes(
    stand: Stand, how: str
) -> None:
    async def together() -> Any:
        return await asyncio.gather(*(stand.play(label, 0.3) for label in [how, "fine"] * 3))

    played = stand.do(together())
    assert [failed.failure for failed in played[::2]] == [Failure.EXIT] * 3
    assert all("pid" in logs for logs in played[1::2])


def test_engine_can_be_called_from_an_event_loop_in_another_thread(stand: Stand) -> None:
    assert "pid" in stand.do(stand.play("asks in a thread"))


def test_oversized_result_fails_its_episode_but_not_the_process(stand: Stand) -> None:
    before = stand.do(stand.play("fine"))
    failed = stand.do(stand.play("huge"))
    assert failed.failure is Failure.RESULT and "67,108,864" in failed.error
    assert stand.do(stand.play("fine"))["pid"] == before["pid"]


def test_forty_episodes_can_wait_in_threads_at_once(stand: Stand) -> None:
    async def together() -> list[Any]:
        return await asyncio.gather(*(stand.play("forty threads") for _ in range(40)))

    assert all("pid" in logs for logs in stand.do(together()))


def test_process_with_a_hung_thread_is_replaced(strict: Stand) -> None:
    before = strict.do(strict.play("fine"))
    assert strict.do(strict.play("hung thread", step_timeout=1.5)).failure is Failure.TIMEOUT
    assert strict.do(strict.play("fine"))["pid"] != before["pid"]


def test_cancelled_episode_is_also_cancelled_in_its_process(stand: Stand) -> None:
    async def cancelled() -> Any:
        asked = asyncio.Event()
        episode = asyncio.create_task(stand.play("fine", generate=never(asked)))
        await asked.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return await stand.play("fine")

    before = stand.do(stand.play("fine"))
    assert stand.do(cancelled()) == {**before, "cancelled": before["cancelled"] + 1}


def test_episode_that_ignores_cancellation_fails_while_waiting_for_the_engine(
    strict: Stand,
) -> None:
    failed = strict.do(strict.play("asks again", 1000, episode_timeout=2.0))
    assert failed.failure is Failure.TIMEOUT
    assert "more than 2 s (--rollout.episode_timeout)" in failed.error


def test_episode_that_kills_every_process_while_waiting_for_the_engine_fails(
    stand: Stand,
) -> None:
    failed = stand.do(stand.play("crashes while it asks", 1000))
    assert failed.failure is Failure.EXIT and "status 7" in failed.error


def test_running_episode_survives_the_crash_of_a_waiting_episode(
    stand: Stand,
) -> None:
    async def together() -> Any:
        return await asyncio.gather(stand.play("crashes while it asks", 1000), stand.play("works"))

    crashed, working = stand.do(together())
    assert crashed.failure is Failure.EXIT
    assert "pid" in working


def test_episode_that_runs_out_of_memory_next_to_another_one_is_retried_alone(stand: Stand) -> None:
    async def together() -> Any:
        return await asyncio.gather(stand.play("hoards"), stand.play("modest"))

    hoarding, modest = stand.do(together())
    assert hoarding["pid"] != modest["pid"]
    assert "modest" in (stand.folder / "agent-alone-0.log").read_text()


def test_episodes_retried_in_their_own_processes_run_concurrently(stand: Stand) -> None:
    """After an episode kills its process, each of its four neighbors is retried in its own process.

    No retried episode can finish until all four have started.
    """

    async def together() -> Any:
        labels = ["exits at the meeting", *["meets"] * 4]
        return await asyncio.gather(*map(stand.play, labels))

    exited, *others = stand.do(together())
    assert exited.failure is Failure.EXIT
    assert len({logs["pid"] for logs in others}) == 4


def test_blocking_episode_fails_and_its_neighbors_succeed(strict: Stand) -> None:
    async def together() -> Any:
        return await asyncio.gather(
            strict.play("block", 0.2, step_timeout=1.5),
            strict.play("fine", 0.6),
            strict.play("fine", 3.0),
        )

    blocked, *others = strict.do(together())
    assert blocked.failure is Failure.TIMEOUT
    assert all("pid" in logs for logs in others)


async def starting(stand: Stand) -> tuple[asyncio.Task[Any], int]:
    """Start an episode, and return its process ID once its process is loading the agent file."""
    episode = asyncio.create_task(stand.play("fine"))
    pids = stand.folder / "pids"
    while not (pids.exists() and pids.read_text()):
        await asyncio.sleep(0.01)
    return episode, int(pids.read_text().split()[0])


def loads_slowly(folder: Path, seconds: float) -> Path:
    """Write an agent file that records the process ID and whose first load takes `seconds`."""
    file = folder / "slow.py"
    file.write_text(
        "import os, time\n"
        f"first = not os.path.exists({str(folder / 'pids')!r})\n"
        f"print(os.getpid(), file=open({str(folder / 'pids')!r}, 'a'))\n"
        f"time.sleep({seconds} if first else 0)\n" + FILE.read_text()
    )
    return file


def test_process_that_dies_while_loading_is_replaced(tmp_path: Path) -> None:
    async def killed() -> Any:
        episode, pid = await starting(stand)
        os.kill(pid, signal.SIGKILL)
        return await episode

    stand = Stand(tmp_path, loads_slowly(tmp_path, 1000))
    assert "pid" in stand.do(killed())
    stand.close()


def test_closed_pool_starts_no_process_for_running_episodes(tmp_path: Path) -> None:
    async def ended() -> Any:
        asked = asyncio.Event()
        waiting = asyncio.create_task(stand.play("fine", generate=never(asked)))
        await asked.wait()
        stand.agents.close()
        return await waiting, await stand.play("fine")

    stand = Stand(tmp_path, loads_slowly(tmp_path, 0))
    for failed in stand.do(ended()):
        assert "closed" in failed.error
    assert len((tmp_path / "pids").read_text().split()) == 1
    stand.runner.close()


def test_close_does_not_wait_for_a_loading_process(tmp_path: Path) -> None:
    async def ended() -> Any:
        episode, _ = await starting(stand)
        stand.agents.close()
        return await episode

    stand = Stand(tmp_path, loads_slowly(tmp_path, 1000))
    assert "closed" in stand.do(ended()).error
    stand.runner.close()
