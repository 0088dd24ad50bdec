"""The fleet: all engines of a model, with their processes, devices and logs, and the choice of an
engine.
"""

import asyncio
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray

from openrlhf.cluster.placement import HostGroup, Machine, Placement, Slots
from openrlhf.cluster.ray_cluster import machines
from openrlhf.cluster.worker_group import (
    DEATHS,
    Call,
    HostHandles,
    WorkerError,
    gather,
    reason_of_death,
)
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.background import CLOSE_TIMEOUT_S, RolloutError
from openrlhf.rollout.engine import EngineDied, EngineError, RequestRefused, RolloutEngine
from openrlhf.rollout.engine_settings import Device, EngineSettings, engine_environment
from openrlhf.rollout.routing import Router
from openrlhf.rollout.sampling import Generation, SamplingParams

WATCH_S = 2.0  # between two looks at all engines


@dataclass(eq=False, kw_only=True)
class Member:
    """One engine of a fleet. `up`: it has a model with the present weights, and may be asked for
    samples.
    """

    index: int
    slots: Slots
    actor: Any = None
    log: str = ""
    up: bool = False
    restarts: int = 0

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Call a method of `RolloutEngine`."""
        return Call((getattr(self.actor, method.__name__).remote(*args, **kwargs),), (self.log,))


class Fleet:
    """Owns the engines. Generator, weight sync and launcher ask the fleet; nothing else has a list
    of engines.

    Its processes import vLLM from the start; `start` gives them a model, and `wait` returns when
    all of them serve. Call `generate` from one event loop only. With `hosts`, the engines use the
    devices of these processes.

    An engine that dies or hangs is started again, with the present weights, which `refit` sends;
    its unfinished samples are drawn again. If its machine is gone, it moves to another or leaves
    the fleet. Engines join, up to --vllm.max_engines, when the cluster has room.
    """

    def __init__(
        self,
        group: HostGroup,
        places: Sequence[Machine],
        *,
        on_gpus: bool,
        hosts: HostHandles | None = None,
    ) -> None:
        self.group, self.hosts, self.on_gpus = replace(group, per_node=1), hosts, on_gpus
        self.workers_per_engine = group.devices
        self.refit: Callable[[Member], None] | None = None
        self.say: Callable[[str], None] = print
        self._device: Device = "cuda" if on_gpus else "cpu"
        self._scratch = tempfile.mkdtemp(
            prefix="openrlhf-"
        )  # for sockets and files that vLLM never removes
        self._failure: Exception | None = None
        self._closed, self._changing = threading.Event(), threading.RLock()
        self._watcher = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._members: dict[int, Member] = {}
        for index, machine in enumerate(places):
            slots = hosts.slots if hosts else Slots(self.group, [machine], on_gpus=on_gpus)
            self._members[index] = self._begun(Member(index=index, slots=slots))
        self._router = Router(self._members)

    def _begun(self, member: Member) -> Member:
        """The member with a new process, which imports vLLM."""
        devices, hosts = self.group.devices, self.hosts
        first = member.index * devices
        engine: Any = ray.remote(RolloutEngine)
        member.actor = engine.options(
            **member.slots.options(first if hosts else 0, owner=not hosts),
            max_concurrency=4096,
            runtime_env={"env_vars": engine_environment(self._device) | {"TMPDIR": self._scratch}},
        ).remote(member.index)
        member.actor.prepare.remote(
            self._device, *(hosts.gpus[first : first + devices] if hosts else [])
        )
        return member

    @property
    def up(self) -> list[Member]:
        """The engines that have a model, in order."""
        return [member for member in list(self._members.values()) if member.up]

    def start(self, settings: EngineSettings, *, log_dir: str, timeout_s: float) -> None:
        """Let all engines load the model, each in its own time. Raises PlacementError if their
        devices are not free.
        """
        self.settings, self.timeout_s, self._log_dir = settings, timeout_s, log_dir
        for member in self._members.values():
            member.slots.wait(timeout_s)
        self._starting = [self._started(member) for member in self._members.values()]

    def _started(self, member: Member) -> Call:
        member.log = f"{self._log_dir}/{self.group.name}-{member.index}.log"
        return member.call(RolloutEngine.start, self.settings, log_path=member.log)

    def wait(self) -> None:
        """Return when all engines serve, or sleep. Raises EngineError or WorkerError."""
        if self.up:
            return
        gather(self._starting, timeout_s=self.timeout_s, doing="start the engines")
        for member in self._members.values():
            member.up = True
        if self.settings.vllm.enable_sleep:
            asked = [member.call(RolloutEngine.sleep) for member in self.up]
            gather(asked, timeout_s=self.timeout_s, doing="put the engines to sleep")
        self._watcher.start()

    def metrics(self) -> dict[str, Metric]:
        """Use of the engines since the last call."""
        return {"timing/engines_idle": self._router.idle(list(self._members))}

    async def rest(self) -> None:
        """Free the memory that others use on the same devices, until the next sample or
        publication.
        """
        asked = [
            (member, member.actor, member.actor.sleep.remote())
            for member in self.up
            if self.settings.vllm.enable_sleep
        ]
        for member, actor, answer in asked:
            try:
                await answer
            except (*DEATHS, EngineDied) as error:
                self.lose(member, actor, error)

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """One sample of the prompt for each of `params`, all from one engine.

        Samples with the same `key` share a prefix. Samples of an engine that dies are drawn again
        by another.
        """
        while True:
            member = await self._serving(key, len(params))
            actor = member.actor
            answer = actor.generate.remote(tokens, params)
            try:
                return [checked(generation, member.index) for generation in await answer]
            except asyncio.CancelledError:  # cancel the samples in the engine too
                ray.cancel(answer)
                raise
            except (*DEATHS, EngineDied) as error:
                self.lose(member, actor, error)
            except RequestRefused as error:  # Ray's copy of it has the traceback as its text
                raise getattr(error, "cause", error) from None
            finally:
                self._router.done(key, member.index, len(params))

    async def _serving(self, key: Hashable, samples: int) -> Member:
        """The engine to ask. Waits while none serves. Raises RolloutError if an engine was lost too
        often.
        """
        self.check()
        while not (serving := [member.index for member in self.up]):
            self.check()
            await asyncio.sleep(0.1)
        return self._members[self._router.pick(key, samples, among=serving)]

    def check(self) -> None:
        """Raise RolloutError if an engine was lost too often."""
        if self._failure:
            raise self._failure

    def lose(self, member: Member, actor: Any, error: Exception) -> None:
        """Note that the process of an engine has died. It is started again, unless that has been
        tried too often.
        """
        with self._changing:
            if not member.up or member.actor is not actor or self._closed.is_set():
                return  # somebody else has noticed
            member.up = False
        self._try_again(member, error)

    def _try_again(self, member: Member, error: Exception) -> None:
        if self._closed.is_set():
            return
        most, reason = (
            self.settings.vllm.max_restarts,
            (str(error).strip() or type(error).__name__).splitlines()[0],
        )
        if member.restarts >= most:
            self._failure = RolloutError(
                f"engine {member.index} was lost after {member.restarts} restart(s) (--vllm.max_restarts {most}): {reason}. "
                f"Its log: {member.log}"
            )
            return
        member.restarts += 1
        self.say(
            f"Engine {member.index} was lost ({reason}). Restart {member.restarts} of {most}; its log: {member.log}"
        )
        threading.Thread(
            target=self._bring_up, args=(member,), name=f"restart-{member.index}", daemon=True
        ).start()

    def _leave(self, member: Member) -> None:
        """Go on without an engine, for which there is no machine any more."""
        del self._members[member.index]
        if not self._members:
            self._failure = RolloutError(
                "the machine of the last engine is gone. Start the run again."
            )
        self.say(
            f"The machine of engine {member.index} is gone: {len(self._members)} engine(s) are left."
        )

    def _join(self, slots: Slots) -> None:
        """Start one more engine."""
        index = max(self._members, default=-1) + 1
        self.say(f"Engine {index} joins on {slots.machine.name}.")
        self._members[index] = Member(index=index, slots=slots)
        self._bring_up(self._members[index])

    def _room(self) -> Slots | None:
        """Free slots for one more engine."""
        group = self.group
        places = Placement(groups=(group,), on_gpus=self.on_gpus).places(
            machines(self.on_gpus, free=True)
        )
        return Slots(group, places[group.name], on_gpus=self.on_gpus) if places else None

    def _bring_up(self, member: Member) -> None:
        """Give a member a process with model and weights, on its machine if that is there. Then it
        serves.
        """
        began = time.monotonic()
        try:
            if member.actor:
                ray.kill(member.actor)
            if not self.hosts and member.slots.machine.id not in {
                m.id for m in machines(self.on_gpus, free=True)
            }:
                member.slots.release()
                if (slots := self._room()) is None:
                    return self._leave(member)
                member.slots = slots
            self._begun(member).slots.wait(self.timeout_s)
            gather([self._started(member)], timeout_s=self.timeout_s, doing="start the engine")
            self._router.add(member.index)
            if self.refit:
                self.refit(member)  # from then on it is up, so that it misses no publication
            member.up = True
            again = f" again after {time.monotonic() - began:.1f} s" if member.restarts else ""
            self.say(f"Engine {member.index} serves{again}.")
        except Exception as error:  # in a thread, where nobody else would see it
            self._try_again(member, error)

    def _watch(self) -> None:
        """Look for engines that do not answer, and for room for more."""
        while not self._closed.wait(WATCH_S):
            try:
                self.find_lost()
                missing = len(self._members) < self.settings.vllm.max_engines and not self.hosts
                if missing and (slots := self._room()):
                    self._join(slots)
            except Exception as error:  # in a thread, where nobody else would see it
                self.say(f"The engines could not be looked after: {error}")

    def find_lost(self) -> None:
        """Ask all engines whether they live. Those that do not answer are started again."""
        asked = {member.actor.ping.remote(): (member, member.actor) for member in self.up}
        answered, silent = ray.wait(
            list(asked), num_returns=len(asked), timeout=self.settings.vllm.hang_timeout
        )
        for reference in silent:
            waited = f"it did not answer within --vllm.hang_timeout {self.settings.vllm.hang_timeout:g} s"
            self.lose(*asked[reference], WorkerError(waited))
        for reference in answered:
            try:
                ray.get(reference)
            except (*DEATHS, EngineError) as error:
                self.lose(*asked[reference], error)

    @contextmanager
    def naming_logs(self) -> Iterator[None]:
        """Within it, an engine's failure is a RolloutError that names the logs."""
        try:
            yield
        except (*DEATHS, EngineError) as error:
            raise RolloutError(
                f"an engine failed: {reason_of_death(error)}. Logs: {', '.join(member.log for member in list(self._members.values()))}"
            ) from error

    def stop(self) -> None:
        """Free the memory of the devices for other processes."""
        self._closed.set()
        asked = [member.call(RolloutEngine.stop) for member in self.up]
        gather(asked, timeout_s=self.timeout_s, doing="end the engines")

    def close(self) -> None:
        """End the processes and release their slots."""
        self._closed.set()
        for member in self._members.values():
            ray.kill(member.actor)
            if not self.hosts:
                member.slots.release()
        if self._watcher.is_alive():
            self._watcher.join(timeout=CLOSE_TIMEOUT_S)
        shutil.rmtree(self._scratch, ignore_errors=True)


def checked(generation: Generation, engine: int) -> Generation:
    """The sample, marked as failed if a log-probability is not finite: a NaN would make all weights
    NaN.
    """
    if math.isfinite(sum(generation.logprobs)):
        return generation
    place = next(
        place for place, logprob in enumerate(generation.logprobs) if not math.isfinite(logprob)
    )
    reason = (
        f"engine {engine} gave its token {place} the log-probability {generation.logprobs[place]}"
    )
    return replace(generation, logprobs=[0.0] * len(generation.tokens), finish_reason=reason)
