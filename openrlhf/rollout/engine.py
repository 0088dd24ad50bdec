"""The rollout engine: a class around vLLM for a Ray actor. Token ids in, token ids out.

    environment = {"env_vars": engine_environment("cpu")}
    engine = ray.remote(RolloutEngine).options(runtime_env=environment).remote(0)
    engine.start.remote(settings)

Only methods of the actor import vLLM, which takes 5 s: the controller imports this module too. No
class of vLLM's leaves the actor, errors included, for the same reason.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

from openrlhf.config.machine import quick_imports
from openrlhf.rollout.engine_settings import ADAPTER_ID, Device, EngineSettings, engine_arguments
from openrlhf.rollout.engine_versions import SampledVersions, check_reload, refusals
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.training.devices import note, redirect_output
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import WorkerReceipt, verify_receipts
from openrlhf.weights.transport import WeightGroup

T = TypeVar("T")


class EngineError(RuntimeError):
    """A call to an engine failed."""


class EngineDied(EngineError):
    """vLLM has ended, or works no more: the engine has to be started again."""


class RequestRefused(EngineError):
    """The engine works, but does not serve this request."""


def _plain_errors(engine: type[T]) -> type[T]:
    """Have public coroutines raise our own classes only: a caller would have to import vLLM to read
    vLLM's exceptions.
    """

    def guarded(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call(self: RolloutEngine, *args: Any, **kwargs: Any) -> Any:
            try:
                return await method(self, *args, **kwargs)
            except (EngineError, PublicationError):
                raise
            except Exception as error:
                died = self._llm is not None and self._llm.errored
                if not died and isinstance(error, refusals()):
                    raise RequestRefused(
                        str(error)
                    ) from None  # the reason alone: agents and their clients read it
                kind = EngineDied if died else EngineError
                raise kind(
                    f"engine {self.index}, {method.__name__}: {type(error).__name__}: {error}"
                ) from None

        return call

    for name, method in list(vars(engine).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(engine, name, guarded(method))
    return engine


@_plain_errors
class RolloutEngine:
    """One vLLM engine. Methods may be called concurrently, and raise EngineError.

    Weights: version 0 is the model folder's. `receive` leaves the engine paused. `resume` lets the
    engine serve, unless the last version it received is unverified.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._llm: Any = None  # vLLM's AsyncLLM, once it is started
        self._requests = itertools.count()
        self._paused = False
        self._unverified: int | None = None
        self._asleep: set[str] = set()  # what is not in the device's memory
        self._waking = asyncio.Lock()

    def prepare(self, device: Device, *gpus: list[str]) -> None:
        """Import vLLM, which takes seconds. `gpus`: of the processes whose devices the engine uses,
        if it has none.
        """
        if gpus and device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(itertools.chain.from_iterable(gpus))
        modules: dict[str, Any] = sys.modules
        compiler = "torch._inductor.lowering"
        with quick_imports():
            if device == "cpu":
                modules[compiler] = (
                    None  # nothing is compiled there, and vLLM goes on if this import fails
                )
                import vllm

                del modules[compiler]
                import vllm.v1.worker.cpu_worker

                import openrlhf.rollout.engine_core  # noqa: F401
            else:
                import vllm.v1.engine.async_llm  # noqa: F401

    async def start(self, settings: EngineSettings, log_path: str | None = None) -> None:
        """Load the model, and serve version 0.

        `log_path`: file for the output of vLLM; without one, vLLM prints to the output of the
        process.
        """
        if log_path:
            redirect_output(log_path)
        self.settings = settings
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**engine_arguments(self.settings, self.index))
        if self.settings.device == "cpu":
            from openrlhf.rollout.engine_core import start_in_thread

            self._llm = start_in_thread(arguments)
        else:
            self._llm = AsyncLLM.from_engine_args(arguments)
        self._versions = SampledVersions(self._llm)
        check_reload(self._llm.vllm_config)

    async def stop(self) -> None:
        """End vLLM's processes and wait for their end, after which the device's memory is free."""
        self._llm.shutdown()
        self._llm = None

    async def generate(
        self, prompt_tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """One sample of the prompt for each of `params`, in their order. Waits during a pause,
        wakes from sleep.
        """
        await self._wake("weights", "kv_cache")
        samples = [asyncio.create_task(self._sample(prompt_tokens, each)) for each in params]
        try:
            return await asyncio.gather(*samples)
        finally:
            for sample in samples:  # end the others if one failed or the caller cancelled
                sample.cancel()

    async def _sample(self, prompt_tokens: list[int], params: SamplingParams) -> Generation:
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest

        request, asked = f"{self.index}-{next(self._requests)}", time.perf_counter()
        adapter = (
            LoRARequest("policy", ADAPTER_ID, "published") if self.settings.lora_rank else None
        )
        stream = self._llm.generate(
            tokens_input(prompt_tokens), self._vllm_params(params), request, lora_request=adapter
        )
        try:
            [answer] = [answer async for answer in stream]  # FINAL_ONLY: there is one
        finally:
            versions = self._versions.pop(request)
        [output] = answer.outputs
        stops = params.stop_token_ids or []
        named = isinstance(output.stop_reason, str) or output.stop_reason in stops
        return Generation(
            tokens=list(output.token_ids),
            logprobs=[
                candidates[token].logprob
                for token, candidates in zip(output.token_ids, output.logprobs, strict=True)
            ],
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason if named else None,
            weight_versions=versions,
            text=output.text if params.stop else None,
            cached_tokens=answer.num_cached_tokens or 0,
            seconds=time.perf_counter() - asked,
        )

    def _vllm_params(self, params: SamplingParams) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if params.stop and not self.settings.stop_strings:
            raise RequestRefused(
                f"stop strings {params.stop!r} need an engine with a tokenizer: stop_strings=True"
            )
        if params.seed is not None and self.settings.device == "cpu" and not self.settings.seeded:
            raise RequestRefused(
                f"seed {params.seed} needs an engine for seeded samples on a CPU: --rollout.seeded"
            )
        stops, vocabulary = params.stop_token_ids or (), self._llm.model_config.get_vocab_size()
        if unknown := [
            token for token in stops if not 0 <= token < vocabulary
        ]:  # fatal to vLLM below 0.29
            raise RequestRefused(
                f"stop_token_ids {unknown} are not in the vocabulary of {vocabulary} tokens"
            )
        ends = [] if params.ignore_eos else list(self.settings.end_token_ids)
        return VLLMSamplingParams(
            **asdict(params) | {"logprobs": 0, "stop_token_ids": [*stops, *ends]},
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def join(self, group: WeightGroup, rank_offset: int) -> None:
        """Leave the previous weight group and join another. `rank_offset`: the rank of this
        engine's first worker.

        The engine stands still until all members have joined. Raises EngineError if a member does
        not join in time.
        """
        await self._llm.collective_rpc("publication_join", args=(pickle.dumps(group), rank_offset))

    async def receive(self, manifest: WeightManifest) -> tuple[WorkerReceipt, ...]:
        """Pause, receive the version that the group's sender sends, and verify it.

        Samples under way are frozen. After `resume` they continue with the new weights and a
        recomputed KV cache. Raises PublicationError if the version did not arrive completely. The
        engine then stays paused until a publication succeeds. Of an engine that sleeps, only the
        weights wake.
        """
        await self._wake("weights")
        if not self._paused:
            await self.pause()
        self._unverified = manifest.version
        try:
            answers = await self._llm.collective_rpc(
                "publication_receive", args=(pickle.dumps(manifest),)
            )
        except Exception as error:
            if self._llm.errored:
                raise
            raise PublicationError(
                f"engine {self.index} could not load version {manifest.version} and stays paused: {error}"
            ) from None
        workers = tuple(map(pickle.loads, answers))
        verify_receipts(manifest, self.index, workers)
        self._unverified = None
        if self.settings.device == "cpu":
            await self._llm.engine_core.call_utility_async("send_held")
        await self._versions.switch(manifest.version)
        return workers

    async def ping(self) -> None:
        """Return when vLLM's core has answered. Raises EngineDied."""
        await self._llm.is_paused()

    async def pause(self) -> None:
        """Freeze the samples under way, and drop the KV cache, which was computed with the present
        weights.
        """
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        self._paused = True

    async def resume(self) -> None:
        """Serve again. Raises EngineError while the last publication is unverified."""
        if self._unverified is not None:
            raise EngineError(
                f"engine {self.index} received version {self._unverified} in part or unverified: publish again"
            )
        if not self._asleep:  # vLLM resumes by itself when the last part wakes
            await self._llm.resume_generation()
        self._paused = False

    async def sleep(self) -> None:
        """Free the device: weights move to CPU memory, and the KV cache is dropped. No sample may
        be under way.
        """
        if self._asleep:
            return
        await self._llm.sleep(level=1)
        self._asleep = {"weights", "kv_cache"}
        note(f"engine {self.index} asleep")

    async def _wake(self, *parts: str) -> None:
        """Bring these parts back into the device's memory, in this order, unless they are there."""
        async with self._waking:
            for part in parts:
                if part in self._asleep:
                    note(f"engine {self.index} awake: {part}")
                    await self._llm.wake_up([part])
                    self._asleep.remove(part)
