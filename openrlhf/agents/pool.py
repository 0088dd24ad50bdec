"""The user's agents in processes of their own, many episodes at once in each; and the engine, asked on their behalf."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.config.options import ConfigError
from openrlhf.processes.pool import Asked, Call, ProcessPool, UserCodeError, loading
from openrlhf.rollout.engine import RequestRefused
from openrlhf.rollout.sampling import Generation, SamplingParams

EPISODES = 128  # of a process at a time; more wait outside, where no deadline runs
GRACE_S = 5.0  # for a cancelled episode to end
Generate = Callable[
    [int, list[int], SamplingParams], Coroutine[Any, Any, Generation]
]  # its number in the episode first


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What a run's agents are, and what bounds them."""

    path: str  # the user's file
    max_length: int  # tokens of an episode
    max_turns: int | None
    step_timeout: float  # seconds of the agent's own work between two samples
    episode_timeout: float  # seconds of an episode, waiting for samples included
    workers: int  # processes
    memory_gib: float  # of a process


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A sample that the engine gave. `own`: whether it is known that this episode asked for it."""

    prompt: list[int]
    generation: Generation
    own: bool = True


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What is to be run. `params` are those of its first sample."""

    prompt: str
    label: Any
    params: SamplingParams
    generate: Generate
    images: Any = None


class EpisodeError(RuntimeError):
    """An episode failed; `samples`: the ones it had by then."""

    def __init__(self, error: UserCodeError) -> None:
        super().__init__(str(error))
        self.failure, self.samples = error.failure, samples_in(error.asked)


class AgentPool:
    """The processes of a run's agents. Its methods belong to one event loop.

    `log_dir` gets what agents print, an `agent-<n>.log` or `agent-alone-<n>.log` per process; without it, the output goes to
    stderr.
    """

    def __init__(self, settings: AgentSettings, tokenizer: Any, *, log_dir: Path | None = None) -> None:
        self.settings = settings
        self._pool = ProcessPool(
            settings.workers, at_once=EPISODES, memory_gib=settings.memory_gib, grace=GRACE_S, log_dir=log_dir, name="agent"
        )  # fmt: skip
        self._setup = loading(
            settings.path, "openrlhf.agents.program:start",
            settings.path, pickle.dumps(tokenizer), settings.max_length, settings.max_turns,
            seconds=settings.step_timeout,
            limit="--rollout.step_timeout",
        )  # fmt: skip

    async def check(self) -> None:
        """Load the user's file in one process. Raises ConfigError with the traceback if that fails."""
        try:
            await self._pool.load(self._setup)
        except UserCodeError as error:
            raise ConfigError(f"--train.agent_func_path: {error}") from error

    async def run(self, episode: Episode) -> tuple[dict[str, Any], list[Sampled]]:
        """What the executor returned for an episode, and the samples it had. Raises EpisodeError."""
        try:
            result, asked = await self._pool.run(self._call(episode, asyncio.get_running_loop()), self._setup)
        except UserCodeError as error:
            raise EpisodeError(error) from error
        return result, samples_in(asked)

    def _call(self, episode: Episode, loop: asyncio.AbstractEventLoop) -> Call:
        settings = self.settings

        async def answer(number: int, question: dict[str, Any]) -> Generation | str:
            """A sample, or the reason why the engine refuses to give one."""
            sampling = episode.generate(number, question["prompt"], SamplingParams(**question["params"]))
            try:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sampling, loop))
            except RequestRefused as refused:
                return str(refused)

        return Call(
            name=f"an episode of {settings.path}",
            target="openrlhf.agents.program:play",
            args=(episode.prompt, episode.label, episode.params, episode.images),
            seconds=settings.step_timeout,
            limit="--rollout.step_timeout, between two samples",
            total_seconds=settings.episode_timeout,
            total_limit="--rollout.episode_timeout",
            answer=answer,
        )

    async def close(self) -> None:
        """Kill every process; episodes under way end with an error."""
        await asyncio.to_thread(self._pool.close)


def samples_in(asked: Sequence[Asked]) -> list[Sampled]:
    """The samples among what an episode was given; the rest are refusals."""
    return [
        Sampled(prompt=each.question["prompt"], generation=each.answer, own=each.own)
        for each in asked
        if isinstance(each.answer, Generation)
    ]
