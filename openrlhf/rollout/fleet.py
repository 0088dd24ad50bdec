"""The fleet: all engines of a model, with their processes, devices and logs, and the choice of an engine."""

import asyncio
import math
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from openrlhf.distributed.placement import HostGroup, actor_options, await_reserved, reserve
from openrlhf.distributed.worker_group import Call, gather
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.engine import EngineError, RolloutEngine
from openrlhf.rollout.engine_settings import Device, EngineSettings, engine_environment
from openrlhf.rollout.routing import Router
from openrlhf.rollout.sampling import Generation, SamplingParams


class Fleet:
    """Owns the engines. Generator, weight sync and launcher ask the fleet; nothing else has a list of engines.

    Its processes import vLLM from the start; `start` gives them a model, and `wait` returns when all of them serve. Call
    `generate` from one event loop only.
    """

    def __init__(self, group: HostGroup, *, on_gpus: bool) -> None:
        self.group = group
        self.logs = [""] * group.slots
        self._reserved = reserve(group, on_gpus=on_gpus)
        self._scratch = tempfile.mkdtemp(prefix="openrlhf-")  # for sockets and files that vLLM never removes
        device: Device = "cuda" if on_gpus else "cpu"
        environment = engine_environment(device) | {"TMPDIR": self._scratch}
        engine: Any = ray.remote(RolloutEngine)
        self._engines: list[Any] = [
            engine.options(
                **actor_options(self._reserved, index, on_gpus=on_gpus),
                max_concurrency=4096,
                runtime_env={"env_vars": environment},
            ).remote(index)
            for index in range(group.slots)
        ]
        self._router = Router(len(self._engines))
        self.call(RolloutEngine.prepare, device)

    @property
    def size(self) -> int:
        """Number of engines."""
        return len(self._engines)

    def start(self, settings: EngineSettings, *, log_dir: str, timeout_s: float) -> None:
        """Let all engines load the model, each in its own time. Raises PlacementError if their devices are not free."""
        self.timeout_s, self.workers_per_engine = timeout_s, settings.vllm.tensor_parallel_size
        await_reserved(self._reserved, self.group.name, timeout_s=timeout_s)
        self.logs = [f"{log_dir}/{self.group.name}-{index}.log" for index in range(self.size)]
        given = [{"settings": settings, "log_path": log} for log in self.logs]
        self._starting = self.call_each(RolloutEngine.start, given)

    def wait(self) -> None:
        """Return when all engines serve. Raises EngineError or WorkerError."""
        gather(self._starting, timeout_s=self.timeout_s, doing="start the engines")

    async def generate(self, key: Hashable, tokens: list[int], params: list[SamplingParams]) -> list[Generation]:
        """One sample of the prompt for each of `params`, all from one engine.

        Samples with the same `key` share a prefix.
        """
        number = self._router.pick(key, len(params))
        answer = self._engines[number].generate.remote(tokens, params)
        try:
            return [checked(generation, number) for generation in await answer]
        except asyncio.CancelledError:  # cancel the samples in the engine too
            ray.cancel(answer)
            raise
        finally:
            self._router.done(key, number, len(params))

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Call]:
        """Call a method of `RolloutEngine` on every engine with the same arguments."""
        return self.call_each(method, [kwargs] * self.size, *args)

    def call_each(self, method: Callable[..., Any], per_engine: Sequence[dict[str, Any]], *args: Any) -> list[Call]:
        """Call a method of `RolloutEngine` on every engine, with different keyword arguments for each engine."""
        return [
            Call((getattr(engine, method.__name__).remote(*args, **kwargs),), (log,))
            for engine, log, kwargs in zip(self._engines, self.logs, per_engine, strict=True)
        ]

    @contextmanager
    def naming_logs(self) -> Iterator[None]:
        """Within it, an engine's failure is a RolloutError that names the logs."""
        try:
            yield
        except (RayActorError, EngineError) as error:
            raise RolloutError(f"an engine failed: {error}. Logs: {', '.join(self.logs)}") from error

    def stop(self) -> None:
        """Free the memory of the devices for other processes."""
        gather(self.call(RolloutEngine.stop), timeout_s=self.timeout_s, doing="end the engines")

    def close(self) -> None:
        """End the processes and release their slots."""
        for engine in self._engines:
            ray.kill(engine)
        ray.util.remove_placement_group(self._reserved)
        shutil.rmtree(self._scratch, ignore_errors=True)


def checked(generation: Generation, engine: int) -> Generation:
    """The sample, marked as failed if a log-probability is not finite: a NaN would make all weights NaN."""
    if math.isfinite(sum(generation.logprobs)):
        return generation
    place = next(place for place, logprob in enumerate(generation.logprobs) if not math.isfinite(logprob))
    reason = f"engine {engine} gave its token {place} the log-probability {generation.logprobs[place]}"
    return replace(generation, logprobs=[0.0] * len(generation.tokens), finish_reason=reason)
