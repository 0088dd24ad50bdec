"""The rollout engine, a Ray actor class that wraps vLLM. The engine receives and returns token ids.

    environment = {"env_vars": engine_environment("cpu")}
    engine = ray.remote(RolloutEngine).options(runtime_env=environment).remote(0)
    engine.start.remote(settings)

Only the actor's methods import vLLM, because the import takes 5 s and the controller also imports
this module. For the same reason, no vLLM object, not even an exception, leaves the actor.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from openrlhf.config.machine import quick_imports
from openrlhf.rollout.engine_settings import ADAPTER_ID, Device, EngineSettings, engine_arguments
from openrlhf.rollout.engine_versions import SampledVersions, check_reload, refusals
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.training.devices import note, redirect_output
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import WorkerReceipt, verify_receipts
from openrlhf.weights.transport import WeightGroup

PARTS = ("weights", "kv_cache")  # parts of the device memory, in the order in which they wake


class EngineError(RuntimeError):
    """Error for a failed call to an engine."""


class EngineDied(EngineError):
    """Error for a call that failed because vLLM died; the engine must be restarted."""


class RequestRefused(EngineError):
    """Error for a request that a working engine rejects."""


def _plain_errors(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Make a method raise only this package's own exceptions.

    The caller would have to import vLLM to unpickle vLLM's exceptions.
    """

    @functools.wraps(method)
    async def call(self: RolloutEngine, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except (EngineError, PublicationError):
            raise
        except Exception as error:
            died = self._llm is not None and self._llm.errored
            if not died and isinstance(error, refusals()):
                # Pass on only the reason, because agents and their clients will read the message.
                raise RequestRefused(str(error)) from None
            cause = f"{type(error).__name__}: {error}"
            message = f"engine {self.index}, {method.__name__}: {cause}"
            if died:
                raise EngineDied(message) from None
            raise EngineError(message) from None

    return call


class RolloutEngine:
    """One vLLM engine. Methods may be called concurrently, and raise EngineError if they fail.

    Version 0 of the weights is loaded from the model folder. `receive` leaves the engine paused.
    `resume` lets the engine serve again, unless the last received version is unverified.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._llm: Any = None  # vLLM's AsyncLLM, after `start`
        self._requests = itertools.count()
        self._paused = False
        self._unverified: int | None = None
        self._asleep: set[str] = set()  # parts that are not in device memory
        self._waking = asyncio.Lock()

    def prepare(self, device: Device, *gpus: list[str]) -> None:
        """Import vLLM, which takes several seconds.

        If the engine shares the devices of other processes, `gpus` lists the GPUs of each process.
        """
        if gpus and device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(itertools.chain.from_iterable(gpus))
        modules: dict[str, Any] = sys.modules
        compiler = "torch._inductor.lowering"
        with quick_imports():
            if device == "cpu":
                # Nothing is compiled on a CPU, and vLLM works without this module.
                modules[compiler] = None
                import vllm

                del modules[compiler]
                import vllm.v1.worker.cpu_worker

                import openrlhf.rollout.engine_core  # noqa: F401
            else:
                import vllm.v1.engine.async_llm  # noqa: F401

    @_plain_errors
    async def start(self, settings: EngineSettings, log_path: str | None = None) -> None:
        """Load the model, and serve version 0.

        `log_path` is the file for vLLM's output. Without `log_path`, vLLM writes to the process's
        own output.
        """
        if log_path:
            redirect_output(log_path)
        self.settings = settings
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**engine_arguments(settings, self.index))
        if settings.device == "cpu":
            from openrlhf.rollout.engine_core import start_in_thread

            self._llm = start_in_thread(arguments)
        else:
            self._llm = AsyncLLM.from_engine_args(arguments)
        self._versions = SampledVersions(self._llm)
        check_reload(self._llm.vllm_config)

    @_plain_errors
    async def stop(self) -> None:
        """Stop vLLM's processes and wait until the device memory is free."""
        self._llm.shutdown()
        self._llm = None

    @_plain_errors
    async def generate(
        self, prompt_tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """Return one sample of the prompt for each of `params`, in the same order.

        Waits while the engine is paused, and wakes the engine if it is asleep.
        """
        await self._wake(*PARTS)
        samples = [asyncio.create_task(self._sample(prompt_tokens, each)) for each in params]
        try:
            return await asyncio.gather(*samples)
        finally:
            for sample in samples:  # cancel all samples after a failure or a cancelled call
                sample.cancel()

    async def _sample(self, prompt_tokens: list[int], params: SamplingParams) -> Generation:
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest

        request = f"{self.index}-{next(self._requests)}"
        asked = time.perf_counter()
        adapter = None
        if self.settings.lora_rank:
            adapter = LoRARequest("policy", ADAPTER_ID, "published")
        stream = self._llm.generate(
            tokens_input(prompt_tokens), self._vllm_params(params), request, lora_request=adapter
        )
        try:
            [answer] = [answer async for answer in stream]  # FINAL_ONLY: a single output
        finally:
            versions = self._versions.pop(request)
        [output] = answer.outputs
        logprobs: list[float] = []
        for token, candidates in zip(output.token_ids, output.logprobs, strict=True):
            logprobs.append(candidates[token].logprob)
        stop_reason = output.stop_reason
        if not isinstance(stop_reason, str) and stop_reason not in (params.stop_token_ids or ()):
            stop_reason = None  # a stop token that is not listed in the parameters
        return Generation(
            tokens=list(output.token_ids),
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=stop_reason,
            weight_versions=versions,
            text=output.text,
            cached_tokens=answer.num_cached_tokens or 0,
            seconds=time.perf_counter() - asked,
        )

    def _vllm_params(self, params: SamplingParams) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = self.settings
        if params.stop and not settings.stop_strings:
            raise RequestRefused(
                f"stop strings {params.stop!r} require an engine with a tokenizer: set "
                "stop_strings=True"
            )
        if params.seed is not None and settings.device == "cpu" and not settings.seeded:
            raise RequestRefused(
                f"seed {params.seed} requires an engine that supports seeds on a CPU: set "
                "--rollout.seeded on"
            )
        stop_tokens = list(params.stop_token_ids or ())
        vocabulary = self._llm.model_config.get_vocab_size()
        unknown = [token for token in stop_tokens if not 0 <= token < vocabulary]
        if unknown:  # unknown tokens would crash vLLM before 0.29
            raise RequestRefused(
                f"stop_token_ids {unknown} are not in the vocabulary of {vocabulary} tokens"
            )
        if not params.ignore_eos:
            stop_tokens += settings.end_token_ids
        return VLLMSamplingParams(
            **asdict(params) | {"logprobs": 0, "stop_token_ids": stop_tokens},
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @_plain_errors
    async def join(self, group: WeightGroup, rank_offset: int) -> None:
        """Leave the previous weight group and join `group`.

        `rank_offset` is the rank of this engine's first worker. The engine does nothing else until
        all members have joined. Raises EngineError if a member does not join in time.
        """
        await self._llm.collective_rpc("publication_join", args=(pickle.dumps(group), rank_offset))

    @_plain_errors
    async def receive(self, manifest: WeightManifest) -> tuple[WorkerReceipt, ...]:
        """Pause the engine, receive the weights from the group's sender, and verify them.

        Running samples are frozen. After `resume`, the samples continue with the new weights and a
        recomputed KV cache. A sleeping engine wakes its weights, but not its KV cache. Raises
        PublicationError if the new version did not arrive completely. In that case, the engine
        stays paused until a publication succeeds.
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
                f"engine {self.index} could not load weight version {manifest.version} and stays "
                f"paused: {error}"
            ) from None
        workers = tuple(map(pickle.loads, answers))
        verify_receipts(manifest, self.index, workers)
        self._unverified = None
        if self.settings.device == "cpu":
            await self._llm.engine_core.call_utility_async("send_held")
        await self._versions.switch(manifest.version)
        return workers

    @_plain_errors
    async def ping(self) -> None:
        """Wait until vLLM's core responds. Raises EngineDied if the core has died."""
        await self._llm.is_paused()

    @_plain_errors
    async def pause(self) -> None:
        """Freeze the running samples.

        The KV cache is dropped, because it was computed with the current weights.
        """
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        self._paused = True

    @_plain_errors
    async def resume(self) -> None:
        """Resume serving. Raises EngineError while the last publication is unverified."""
        if self._unverified is not None:
            raise EngineError(
                f"engine {self.index} cannot resume, because weight version {self._unverified} is "
                "incomplete or unverified: publish again"
            )
        if not self._asleep:  # vLLM resumes on its own when the last part wakes
            await self._llm.resume_generation()
        self._paused = False

    @_plain_errors
    async def sleep(self) -> None:
        """Free the device memory: move the weights to CPU memory, and drop the KV cache.

        No sample may be running.
        """
        if self._asleep.issuperset(PARTS):
            return
        # A publication wakes only the weights. Some versions of vLLM sleep only if all parts are
        # awake.
        await self._wake(*PARTS)
        await self._llm.sleep(level=1)
        self._asleep = set(PARTS)
        note(f"engine {self.index} asleep")

    async def _wake(self, *parts: str) -> None:
        """Move `parts` back to device memory in the given order, skipping parts that are awake."""
        async with self._waking:
            for part in parts:
                if part in self._asleep:
                    note(f"engine {self.index} awake: {part}")
                    await self._llm.wake_up([part])
                    self._asleep.remove(part)
