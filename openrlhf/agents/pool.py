"""Hosts that run the user's agents, many episodes at once in each, with deadlines; and the engine, asked on their behalf.

An episode that takes too long is cancelled; where that does not help, because its code blocks the host's event loop, the host
is killed. Of the others in a killed host, those that waited for the engine begin again elsewhere. Those whose own code was
running begin again too, each alone in a host of its own: the one that was to blame ends that host as well, and has failed.
A host where an episode took too long is replaced once it has no others: threads that the episode left may still hang there.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf.config.options import ConfigError
from openrlhf.processes.host import DUMP_SECONDS, MAX_REPLY_BYTES, HostError, HostLoadError, HostProcess, frame
from openrlhf.processes.host_process import LENGTH
from openrlhf.rollout.engine import RequestRefused
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trajectory import Failure

logger = logging.getLogger(__name__)
EPISODES = 128  # of a host at a time; more wait outside, where no deadline runs
LEAST_ALONE = 4  # hosts for episodes that are played alone
LOSSES = 4  # of its hosts, after which an episode is suspected too that only waited for the engine
GRACE_S = 5.0  # for a cancelled episode to end
Generate = Callable[
    [int, list[int], SamplingParams], Awaitable[Generation]
]  # the first argument counts an episode's samples


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What a run's agents are, and what bounds them."""

    path: str  # the user's file
    max_length: int  # tokens of an episode
    max_turns: int | None
    step_timeout: float  # seconds of the agent's own work between two samples
    episode_timeout: float  # seconds of an episode, waiting for samples included
    workers: int  # hosts
    memory_gib: float  # of a host
    load_timeout: float = 120.0  # seconds for the file's imports


@dataclass(frozen=True, kw_only=True)
class Call:
    """A sample that an episode asked for, and got."""

    prompt: list[int]
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What is to be run. `params` are those of its first sample."""

    prompt: str
    label: Any
    params: SamplingParams
    generate: Generate
    images: Any = None


class EpisodeError(HostError):
    """An episode failed; `calls` are the samples it had by then."""

    def __init__(self, error: HostError, calls: Sequence[Call]) -> None:
        super().__init__(str(error), error.failure)
        self.calls = calls


class _Lost(HostError):
    """The host of an episode is gone; `suspect` where it may have been this episode's doing. `calls`: its samples by then."""

    def __init__(self, error: HostError, *, suspect: bool, calls: Sequence[Call] = ()) -> None:
        super().__init__(str(error), error.failure)
        self.suspect, self.calls = suspect, calls


class _Deadline(NamedTuple):
    seconds: float
    words: str  # what is wrong once it has passed


@dataclass(eq=False, kw_only=True)
class _Running:
    """An episode in a host."""

    number: int
    episode: Episode
    done: asyncio.Future[dict[str, Any]]
    asked: int = 0  # samples so far
    calls: list[Call] = field(default_factory=list)
    samples: set[asyncio.Task[None]] = field(default_factory=set)  # asked for, not answered yet
    clock: asyncio.TimerHandle | None = None  # of the agent's own work
    late: _Deadline | None = None  # missed


class AgentHost(HostProcess):
    """One host process with the user's executor. Belongs to one event loop."""

    def __init__(self, settings: AgentSettings, tokenizer: bytes, log: Path | None) -> None:
        super().__init__("openrlhf.agents.host_program", int(settings.memory_gib * 2**30), log)
        self.settings, self.tokenizer = settings, tokenizer
        self.running: dict[int, _Running] = {}
        self.episodes = 0  # given to this host, those that wait for its start too
        self._numbers = 0
        self._ready: asyncio.Task[None] | None = None
        self.worn = False  # an episode was late here
        self._going = False  # the process has ended, or is about to: what comes now is for the next one
        self._closed = False

    async def ready(self) -> None:
        """Start the process, or wait until it has started. Raises HostLoadError where the user's file is at fault."""
        if self._going:
            await asyncio.shield(self._listener)
        if self._closed:
            raise HostError("the hosts of agents were closed")
        if self._ready is None or (self._ready.done() and (self._ready.cancelled() or self._ready.exception())):
            self._ready = asyncio.get_running_loop().create_task(self._begin())
        await asyncio.shield(self._ready)

    async def _begin(self) -> None:
        settings = self.settings
        self.start()
        log_start = self.log_size
        self._reader, self._writer = await asyncio.open_connection(sock=self.socket.dup())
        self._write(
            kind="start", path=settings.path, tokenizer=self.tokenizer, max_length=settings.max_length,
            max_turns=settings.max_turns,
        )  # fmt: skip
        try:
            reply = await asyncio.wait_for(self._message(), settings.load_timeout)
        except (OSError, EOFError, TimeoutError) as error:
            expired = isinstance(error, TimeoutError)
            lost = await self.loss(f"loading {settings.path}", settings.load_timeout, log_start, expired=expired)
            self.stop()
            raise (HostLoadError(str(lost), lost.failure) if expired else _Lost(lost, suspect=False)) from None
        if reply["error"] is not None:
            self.stop()
            raise HostLoadError(f"{settings.path} cannot be loaded:\n{reply['error']}")
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def run(self, episode: Episode) -> tuple[dict[str, Any], list[Call]]:
        """What the executor returned for an episode, and the samples it had. Raises EpisodeError, _Lost, HostLoadError."""
        self.episodes += 1
        try:
            await self.ready()
            return await self._run(episode)
        finally:
            self.episodes -= 1
            if self.worn and not self.episodes:
                self._let_go()

    def _let_go(self) -> None:
        """Kill the process, which still serves."""
        self._going = True
        self.cut()

    async def _run(self, episode: Episode) -> tuple[dict[str, Any], list[Call]]:
        loop = asyncio.get_running_loop()
        self._numbers += 1
        running = _Running(number=self._numbers, episode=episode, done=loop.create_future())
        self.running[running.number] = running
        limit = self.settings.episode_timeout
        late = _Deadline(limit, f"the episode took more than --rollout.episode_timeout {limit:g} s")
        end = loop.call_later(limit, self._cancel, running, late)
        try:
            self._write(
                kind="episode", episode=running.number, prompt=episode.prompt, label=episode.label,
                params=episode.params, images=episode.images,
            )  # fmt: skip
            self._wind(running)
            return await running.done, running.calls
        finally:
            end.cancel()
            self._forget(running)

    def _forget(self, running: _Running) -> None:
        self.running.pop(running.number, None)
        if running.clock:
            running.clock.cancel()
        for sample in running.samples:
            sample.cancel()
        if running.done.cancelled():  # given up here, and the host does not know
            self._write(kind="cancel", episode=running.number)

    def _wind(self, running: _Running) -> None:
        """Start the clock of the agent's own work."""
        limit = self.settings.step_timeout
        late = _Deadline(limit, f"the agent took more than --rollout.step_timeout {limit:g} s between two samples")
        running.clock = asyncio.get_running_loop().call_later(limit, self._cancel, running, late)

    def _cancel(self, running: _Running, late: _Deadline) -> None:
        """Ask the host to end an episode; kill the host where it does not."""
        if running.late is None and not running.done.done():
            running.late = late
            self._write(kind="cancel", episode=running.number)
            asyncio.get_running_loop().call_later(GRACE_S, self._insist, running)

    def _insist(self, running: _Running) -> None:
        if not running.done.done():
            self.dump()
            asyncio.get_running_loop().call_later(DUMP_SECONDS, self._end, running)

    def _end(self, running: _Running) -> None:
        if not running.done.done():  # otherwise its host is gone already, and this is another
            self._let_go()

    async def _listen(self) -> None:
        """Take what the host says, until it is gone."""
        log_start, culprit_known = self.log_size, False
        with suppress(OSError, EOFError):
            while not culprit_known:
                message = await self._message()
                kind, running = message.pop("kind"), self.running.get(message.pop("episode"))
                if running is None or running.done.done():
                    continue
                if kind == "generate":
                    self._sample(running, **message)
                else:
                    culprit_known = self._finish(running, **message)
        self._going = True
        left = [running for running in self.running.values() if not running.done.done()]
        suspects = [] if culprit_known else [running for running in left if running.late or not running.samples]
        late = next((running.late for running in suspects if running.late), None)
        activity, limit = f"an episode of {self.settings.path}", late.seconds if late else 0.0
        error = await self.loss(activity, limit, log_start, expired=late is not None)
        self.stop()
        self._ready, self.worn, self._going = None, False, False
        for running in list(self.running.values()):  # those that had waited for the start too
            if not running.done.done():
                alone = suspects == left == [running]  # nobody else can have been to blame
                lost = _Lost(error, suspect=running in suspects, calls=running.calls)
                running.done.set_exception(EpisodeError(error, running.calls) if alone else lost)

    def _finish(
        self,
        running: _Running,
        *,
        result: dict[str, Any] | None = None,
        error: str = "",
        failure: str = "",
        broken: bool = False,
    ) -> bool:
        """An episode is over; whether its host should not be used again."""
        self.worn |= running.late is not None
        if result is not None:
            running.done.set_result(result)
        else:
            words = f"{running.late.words}, and was ended here" if running.late else "the agent raised"
            memory = f"(--reward.memory_gib is {self.settings.memory_gib:g}.)" if failure == Failure.MEMORY else ""
            reason = HostError(f"{words}:\n{error}{memory}", Failure.TIMEOUT if running.late else Failure(failure))
            shared = failure == Failure.MEMORY and len(self.running) > 1  # others may have what it lacked
            failed = _Lost(reason, suspect=True, calls=running.calls) if shared else EpisodeError(reason, running.calls)
            running.done.set_exception(failed)
        return broken

    def _sample(self, running: _Running, *, call: int, prompt: list[int], params: dict[str, Any]) -> None:
        """Ask the engine for an episode. While it waits for a sample, the clock of its own work stands."""
        if running.clock:
            running.clock.cancel()

        async def sample(number: int) -> None:
            generation, error = None, None
            try:
                generation = await running.episode.generate(number, prompt, SamplingParams(**params))
                running.calls.append(Call(prompt=prompt, generation=generation))
            except RequestRefused as refused:
                error = str(refused)
            except Exception as failed:  # the engine is gone: not the agent's affair
                if not running.done.done():
                    running.done.set_exception(failed)
                    self._write(kind="cancel", episode=running.number)
                return
            running.samples.discard(task)
            if not running.samples and not running.done.done():
                self._wind(running)
            self._write(kind="generated", call=call, generation=generation, error=error)

        task = asyncio.get_running_loop().create_task(sample(running.asked))
        running.asked += 1
        running.samples.add(task)

    def _write(self, **message: Any) -> None:
        if not self._writer.is_closing():  # of a host that is gone, the listener tells
            self._writer.write(frame(**message))

    async def _message(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_REPLY_BYTES:
            raise EOFError
        return marshal.loads(await self._reader.readexactly(length))

    def stop(self) -> None:
        """Close the connection too."""
        self._writer.transport.abort()
        super().stop()

    async def close(self) -> None:
        """Kill the process, if there is one; its episodes end with an error."""
        self._closed = True
        if self._ready is None:
            return
        with suppress(HostError):
            if not self._ready.done():
                self.cut()
            await self._ready
            self.cut()
            await self._listener
        await asyncio.to_thread(self.buried)


class AgentPool:
    """The hosts of a run's agents. Its methods belong to one event loop.

    `log_dir` gets what agents print, an `agent-<n>.log` or `agent-alone-<n>.log` per host; without it, that goes to stderr.
    """

    def __init__(self, settings: AgentSettings, tokenizer: Any, *, log_dir: Path | None = None) -> None:
        pickled = pickle.dumps(tokenizer)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)

        def hosts(count: int, name: str) -> list[AgentHost]:
            logs = [log_dir and log_dir / f"agent-{name}{number}.log" for number in range(count)]
            return [AgentHost(settings, pickled, log) for log in logs]

        self._hosts = hosts(settings.workers, "")
        self._quarantine = hosts(max(LEAST_ALONE, settings.workers), "alone-")
        self._places = asyncio.Semaphore(EPISODES * settings.workers)  # given in the order they are asked for
        self._cells = asyncio.LifoQueue[AgentHost]()  # of the quarantine, those that are free
        for host in reversed(self._quarantine):
            self._cells.put_nowait(host)

    async def check(self) -> None:
        """Load the user's file in one host. Raises ConfigError with the traceback where that fails."""
        try:
            await self._hosts[0].ready()
        except HostError as error:
            raise ConfigError(f"--train.agent_func_path: {error}") from error

    async def run(self, episode: Episode) -> tuple[dict[str, Any], list[Call]]:
        """What the executor returned for an episode, and the samples it had. Raises EpisodeError, HostLoadError."""
        async with self._places:
            for _ in range(LOSSES):
                host = min(self._hosts, key=lambda host: (host.worn, host.episodes))
                try:
                    return await host.run(episode)
                except _Lost as lost:
                    if lost.suspect:
                        break
            _tell_of_quarantine()
            cell = await self._cells.get()
            try:
                return await cell.run(episode)
            except _Lost as lost:
                raise EpisodeError(lost, lost.calls) from lost
            finally:
                self._cells.put_nowait(cell)

    async def close(self) -> None:
        """Kill every host."""
        await asyncio.gather(*(host.close() for host in [*self._hosts, *self._quarantine]))


@cache
def _tell_of_quarantine() -> None:
    """Say once why episodes take so long."""
    logger.warning(
        "Episodes whose host was lost or blocked, or that lacked memory beside others, are played again, each alone in a host."
    )
