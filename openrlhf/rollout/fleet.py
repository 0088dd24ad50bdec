"""The fleet: all engines of a model, with their processes, devices and logs."""

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
from ray.exceptions import GetTimeoutError

from openrlhf.cluster.placement import HostGroup, Machine, Placement, Slots
from openrlhf.cluster.ray_cluster import machines
from openrlhf.cluster.worker_group import (
    DEATHS,
    Call,
    HostHandles,
    WorkerError,
    reason_of_death,
    wait_for,
)
from openrlhf.config.flags import ConfigError
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.background import CLOSE_TIMEOUT_S, RolloutError
from openrlhf.rollout.engine import EngineDied, EngineError, RequestRefused, RolloutEngine
from openrlhf.rollout.engine_settings import Device, EngineSettings, engine_environment
from openrlhf.rollout.routing import Router
from openrlhf.rollout.sampling import Generation, SamplingParams

WATCH_INTERVAL_S = 2.0  # interval between checks of all engines


@dataclass(eq=False, kw_only=True)
class Member:
    """One engine of a fleet."""

    index: int
    slots: Slots
    actor: Any = None
    log: str = ""
    up: bool = False  # True if the engine has loaded the current weights and can generate samples
    restarts: int = 0

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Call a method of `RolloutEngine`."""
        return Call((getattr(self.actor, method.__name__).remote(*args, **kwargs),), (self.log,))


class Fleet:
    """All engines of a model. No other object holds a list of engines.

    The processes start importing vLLM when they are created. `start` makes these processes load the
    model, and `wait` returns when all engines are ready. Call `generate` from one event loop only.
    With `hosts`, the engines use the devices of the host processes.

    An engine that dies or hangs is restarted, and `refit` sends it the current weights; its
    unfinished samples are generated again. If its machine is gone, the engine moves to another
    machine or leaves the fleet. Engines join, up to --vllm.max_engines, when the cluster has room.
    """

    def __init__(
        self,
        group: HostGroup,
        places: Sequence[Machine],
        *,
        on_gpus: bool,
        hosts: HostHandles | None = None,
    ) -> None:
        self.group = replace(group, processes=1)
        self.hosts = hosts
        self.on_gpus = on_gpus
        self.workers_per_engine = group.devices
        self.refit: Callable[[Member], None] | None = None
        self.say: Callable[[str], None] = print
        # A temporary folder for the sockets and files that vLLM never removes.
        self._scratch = tempfile.mkdtemp(prefix="openrlhf-")
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._changing = threading.RLock()
        self._watcher = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._members: dict[int, Member] = {}
        for index, machine in enumerate(places):
            if hosts:
                slots = hosts.slots
            else:
                slots = Slots(self.group, [machine], on_gpus=on_gpus)
            self._members[index] = Member(index=index, slots=slots)
            self._launch(self._members[index])
        self._router = Router(self._members)

    def _launch(self, member: Member) -> None:
        """Start a new process for a member. The process imports vLLM."""
        device: Device = "cuda" if self.on_gpus else "cpu"
        environment = engine_environment(device) | {"TMPDIR": self._scratch}
        gpus: list[Any] = []
        if self.hosts:
            first = member.index * self.group.devices
            placement = member.slots.options(first, owner=False)
            gpus = self.hosts.gpus[first : first + self.group.devices]
        else:
            placement = member.slots.options(0)
        engine: Any = ray.remote(RolloutEngine)
        member.actor = engine.options(
            **placement, max_concurrency=4096, runtime_env={"env_vars": environment}
        ).remote(member.index)
        member.actor.prepare.remote(device, *gpus)

    @property
    def up(self) -> list[Member]:
        """The engines that are ready to serve, in order."""
        return [member for member in list(self._members.values()) if member.up]

    def start(self, settings: EngineSettings, *, log_dir: str, timeout_s: float) -> None:
        """Make all engines load the model, without waiting for them.

        Raises PlacementError if the engines' devices are not free.
        """
        self.settings = settings
        self.timeout_s = timeout_s
        self._log_dir = log_dir
        for member in self._members.values():
            member.slots.wait(timeout_s)
        self._loading = list(map(self._load, self._members.values()))

    def _load(self, member: Member) -> Call:
        member.log = f"{self._log_dir}/{self.group.name}-{member.index}.log"
        return member.call(RolloutEngine.start, self.settings, log_path=member.log)

    def wait(self) -> None:
        """Wait until all engines are ready or asleep.

        Raises ConfigError if vLLM rejects the model or its settings, else EngineError or
        WorkerError.
        """
        if self.up:
            return
        try:
            wait_for(self._loading, timeout_s=self.timeout_s, doing="start the engines")
        except RequestRefused as refused:
            raise ConfigError(f"vLLM cannot serve {self.settings.model}: {refused}") from None
        for member in self._members.values():
            member.up = True
        if self.settings.vllm.enable_sleep:
            calls = [member.call(RolloutEngine.sleep) for member in self.up]
            wait_for(calls, timeout_s=self.timeout_s, doing="put the engines to sleep")
        self._watcher.start()

    def metrics(self) -> dict[str, Metric]:
        """Return metrics of engine utilization since the last call."""
        return {"timing/engines_idle": self._router.idle(list(self._members))}

    async def rest(self) -> None:
        """Free device memory for the processes that share the engines' devices.

        The device memory stays free until the next sample or publication.
        """
        if not self.settings.vllm.enable_sleep:
            return
        calls = {member.actor.sleep.remote(): (member, member.actor) for member in self.up}
        for answer, (member, actor) in calls.items():
            try:
                await answer
            except (*DEATHS, EngineDied) as error:
                self.lose(member, actor, error)

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """Return one sample of the prompt for each of `params`, all from the same engine.

        Samples with the same `key` share a prefix. If the engine dies, another engine generates the
        samples again.
        """
        while True:
            member = await self._pick(key, len(params))
            actor = member.actor
            answer = actor.generate.remote(tokens, params)
            try:
                return [mark_nonfinite(sample, member.index) for sample in await answer]
            except asyncio.CancelledError:  # cancel the samples in the engine, too
                ray.cancel(answer)
                raise
            except (*DEATHS, EngineDied) as error:
                self.lose(member, actor, error)
            except RequestRefused as error:  # the message of Ray's copy includes a traceback
                raise getattr(error, "cause", error) from None
            finally:
                self._router.done(key, member.index, len(params))

    async def _pick(self, key: Hashable, samples: int) -> Member:
        """Wait until an engine is ready, and return the engine to sample from.

        Raises RolloutError if an engine was lost too often.
        """
        while True:
            self.check()
            serving = {member.index: member for member in self.up}
            if serving:
                return serving[self._router.pick(key, samples, among=list(serving))]
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raise RolloutError if an engine was lost too often."""
        if self._failure:
            raise self._failure

    def lose(self, member: Member, actor: Any, error: Exception) -> None:
        """Record that the process `actor` of an engine has died, and restart the engine.

        After --vllm.max_restarts restarts, the fleet fails instead.
        """
        with self._changing:
            if not member.up or member.actor is not actor or self._closed.is_set():
                return  # another thread has already handled this loss
            member.up = False
        self._restart(member, error)

    def _restart(self, member: Member, error: Exception) -> None:
        if self._closed.is_set():
            return
        most = self.settings.vllm.max_restarts
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if member.restarts >= most:
            self._failure = RolloutError(
                f"engine {member.index} was lost after {member.restarts} restart(s) "
                f"(--vllm.max_restarts {most}): {reason}. Its log: {member.log}"
            )
            return
        member.restarts += 1
        self.say(
            f"Engine {member.index} was lost ({reason}). Restart {member.restarts} of {most}; its "
            f"log: {member.log}"
        )
        self._bring_up_in_background(member, f"restart-{member.index}")

    def _bring_up_in_background(self, member: Member, name: str) -> None:
        threading.Thread(target=self._bring_up, args=(member,), name=name, daemon=True).start()

    def _leave(self, member: Member) -> None:
        """Remove an engine whose machine is gone and cannot be replaced."""
        with self._changing:
            del self._members[member.index]
        if not self._members:
            self._failure = RolloutError("the last engine's machine is gone. Start the run again.")
        self.say(
            f"The machine of engine {member.index} is gone. {len(self._members)} engine(s) remain "
            "in the fleet."
        )

    def _join(self, slots: Slots) -> None:
        """Add an engine, and start it in another thread, so that the fleet is still watched."""
        with self._changing:
            index = max(self._members, default=-1) + 1
            member = self._members[index] = Member(index=index, slots=slots)
        self.say(f"Engine {index} joins on {slots.machine.name}.")
        self._bring_up_in_background(member, f"join-{index}")

    def _room(self) -> Slots | None:
        """Reserve free slots for one more engine. Return None if no slots are free."""
        plan = Placement(groups=(self.group,), on_gpus=self.on_gpus)
        places = plan.places(machines(self.on_gpus, free=True))
        if not places:
            return None
        return Slots(self.group, places[self.group.name], on_gpus=self.on_gpus)

    def _bring_up(self, member: Member) -> None:
        """Start a member in a new process, and load the model and the current weights.

        The member stays on its machine, unless the machine is gone.
        """
        began = time.monotonic()
        try:
            if member.actor:
                ray.kill(member.actor)
            if not self.hosts:
                present = {machine.id for machine in machines(self.on_gpus, free=True)}
                if member.slots.machine.id not in present:
                    member.slots.release()
                    slots = self._room()
                    if slots is None:
                        self._leave(member)
                        return
                    member.slots = slots
            with self._changing:
                if self._closed.is_set():  # `close` knows neither a new process nor new slots
                    self._release(member)
                    return
                self._launch(member)
            member.slots.wait(self.timeout_s)
            wait_for([self._load(member)], timeout_s=self.timeout_s, doing="start the engine")
            self._router.add(member.index)
            if self.refit:
                self.refit(member)  # `refit` sets `up`, so that the member misses no publication
            else:
                member.up = True
            self.say(f"Engine {member.index} is up after {time.monotonic() - began:.1f} s.")
        except Exception as error:  # errors in this thread would otherwise not be reported
            self._restart(member, error)

    def _watch(self) -> None:
        """Check regularly for unresponsive engines and for room for more engines."""
        while not self._closed.wait(WATCH_INTERVAL_S):
            try:
                self.find_lost()
                if self._can_grow and (slots := self._room()):
                    self._join(slots)
            except Exception as error:  # errors in this thread would otherwise not be reported
                self.say(f"Checking the engines failed: {error}")

    @property
    def _can_grow(self) -> bool:
        """True if another engine may join. No engine joins while another one is starting."""
        if self.hosts:
            return False
        return len(self.up) == len(self._members) < self.settings.vllm.max_engines

    def find_lost(self) -> None:
        """Check that all engines respond, and restart unresponsive engines."""
        calls = {member.actor.ping.remote(): (member, member.actor) for member in self.up}
        timeout_s = self.settings.vllm.hang_timeout
        ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        for answer, (member, actor) in calls.items():
            try:
                ray.get(answer, timeout=0)
            except GetTimeoutError:
                reason = f"it did not respond within --vllm.hang_timeout {timeout_s:g} s"
                self.lose(member, actor, WorkerError(reason))
            except (*DEATHS, EngineError) as error:
                self.lose(member, actor, error)

    @contextmanager
    def naming_logs(self) -> Iterator[None]:
        """Convert an engine failure in the block to a RolloutError that names the logs."""
        try:
            yield
        except (*DEATHS, EngineError) as error:
            logs = ", ".join(member.log for member in list(self._members.values()))
            raise RolloutError(
                f"an engine failed: {reason_of_death(error)}. Logs: {logs}"
            ) from error

    def stop(self) -> None:
        """Stop the engines, so that other processes can use the device memory."""
        self._closed.set()
        calls = [member.call(RolloutEngine.stop) for member in self.up]
        wait_for(calls, timeout_s=self.timeout_s, doing="end the engines")

    def close(self) -> None:
        """End all processes and release their slots."""
        with self._changing:
            self._closed.set()
            members = list(self._members.values())
        for member in members:
            if member.actor:
                ray.kill(member.actor)
            self._release(member)
        if self._watcher.is_alive():
            self._watcher.join(timeout=CLOSE_TIMEOUT_S)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _release(self, member: Member) -> None:
        """Release a member's slots, unless they belong to the host processes."""
        if not self.hosts:
            member.slots.release()


def mark_nonfinite(sample: Generation, engine: int) -> Generation:
    """Return the sample, marked as failed if a log-probability is not finite.

    Training on a NaN would make all weights NaN.
    """
    if math.isfinite(sum(sample.logprobs)):
        return sample
    position = list(map(math.isfinite, sample.logprobs)).index(False)
    logprob = sample.logprobs[position]
    reason = f"engine {engine} returned the log-probability {logprob} for token {position}"
    return replace(sample, logprobs=[0.0] * len(sample.tokens), finish_reason=reason)
