"""vLLM's engine core in a thread of the engine actor, for engines on a CPU.

vLLM runs the core in its own process, which imports everything a second time. In a thread, the same
`AsyncLLM` starts in about 2 s instead of 7 to 18 s and uses 0.7 GiB instead of 1.1 GiB. The thread
relies on two vLLM hooks: the argument `client_addresses` of `AsyncLLM`, which is used by vLLM's API
servers, and a core without a handshake, as in vLLM's Ray actors.
"""

import json
import pickle
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from torch import Tensor
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata

from openrlhf.rollout.engine_settings import CPU_KV_CACHE_BYTES


def start_in_thread(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Start an engine whose core runs until the process exits.

    Raises any exception that occurs while the core starts.
    """
    register_architectures(arguments.model)
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    head_size = config.model_config.get_head_size()
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in supported:  # vLLM would crash without a message at the first sample
        raise ValueError(
            f"its head size is {head_size}, and vLLM's CPU attention supports only the sizes "
            f"{supported}. Use a model with one of these head sizes."
        )
    if config.speculative_config:
        correct_rejection_sampler()
    inputs = get_open_zmq_ipc_path()
    outputs = get_open_zmq_ipc_path()
    sockets = EngineZmqAddresses(inputs=[inputs], outputs=[outputs])
    started = Future[_Core]()
    threading.Thread(
        target=run_core, args=(config, sockets, started), name="vllm-engine-core", daemon=True
    ).start()
    started.result()
    addresses = {"input_address": inputs, "output_address": outputs}
    return AsyncLLM(
        config,
        Executor.get_class(config),
        log_stats=False,
        log_requests=False,
        client_addresses=addresses,
    )


def register_architectures(model: str) -> None:
    """Register a model's classes with vLLM.

    vLLM would inspect unregistered classes in a subprocess, which takes 11 s.
    """
    config = Path(model) / "config.json"
    if not config.is_file():
        return
    for name in json.loads(config.read_text()).get("architectures", []):
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def correct_rejection_sampler() -> None:
    """Make vLLM verify draft tokens with the temperature, top-k and top-p of their sample.

    On a CPU without Triton, vLLM writes these values into a copy that is discarded, and divides by
    uninitialized memory. The log-probabilities are then NaN and seeds have no effect. In addition,
    top-k fails in any step without drafts.
    """
    constrain = rejection_sampler.apply_sampling_constraints

    def expand(
        x: Tensor,
        cu_num_tokens: Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Tensor:
        num_tokens_of_each = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(num_tokens_of_each)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    def constrain_drafts(
        logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        if not len(logits):
            return logits
        return constrain(logits, cu_num_draft_tokens, sampling_metadata)

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = constrain_drafts


class _Core(EngineCoreProc):
    """An engine core that gets its addresses without a handshake and sends only finished samples.

    vLLM's core sends every token of every sample through a socket. Only the detokenizer at the
    other end needs individual tokens, because it searches for stop strings.
    """

    def __init__(self, config: VllmConfig, addresses: EngineZmqAddresses) -> None:
        self._known_addresses = addresses
        self._held: dict[str, list[EngineCoreOutput]] = defaultdict(list)  # by request
        super().__init__(config, True, "", Executor.get_class(config), False, engine_index=0)
        if config.model_config.skip_tokenizer_init:
            step = self.step_fn
            self.step_fn = lambda: self._finished(*step())

    @contextmanager
    def _perform_handshakes(self, *args: object, **kwargs: object) -> Iterator[EngineZmqAddresses]:
        yield self._known_addresses

    def _initialize_kv_caches(self, vllm_config: VllmConfig) -> KVCacheConfig:
        """Limit the default cache to twice the size that a full batch of the longest samples needs.

        A larger cache would only take longer to fill with zeros.
        """
        cache = vllm_config.cache_config
        if cache.kv_cache_memory_bytes == CPU_KV_CACHE_BYTES:
            longest_sample_bytes = max(
                max_memory_usage_bytes(vllm_config, specs.values())
                for specs in self.model_executor.get_kv_cache_specs()  # for each worker
            )
            full_batch_bytes = vllm_config.scheduler_config.max_num_seqs * longest_sample_bytes
            cache.kv_cache_memory_bytes = min(2 * full_batch_bytes, CPU_KV_CACHE_BYTES)
        return super()._initialize_kv_caches(vllm_config)

    def _finished(
        self, outputs: dict[int, EngineCoreOutputs] | None, executed: bool
    ) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Return a step's outputs for finished samples, and hold back all other outputs."""
        complete: dict[int, EngineCoreOutputs] = {}
        for client, step in (outputs or {}).items():
            finished: list[EngineCoreOutput] = []
            for output in step.outputs:
                self._held[output.request_id].append(output)
                if output.finished:
                    finished.append(join_outputs(self._held.pop(output.request_id)))
            step.outputs = finished
            if finished:
                complete[client] = step
        return complete, executed

    def send_held(self) -> None:
        """Send the tokens held back so far, because later tokens will have a new weight version."""
        if parts := list(map(join_outputs, self._held.values())):
            self.output_queue.put_nowait((0, EngineCoreOutputs(outputs=parts)))
        self._held.clear()

    def abort_requests(self, request_ids: list[str]) -> None:
        for request in request_ids:
            self._held.pop(request, None)
        super().abort_requests(request_ids)


def join_outputs(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return a request's last output with the tokens and log-probabilities of all its outputs."""
    tokens: list[int] = []
    logprobs: list[tuple[Any, ...]] = []
    for output in outputs:
        tokens += output.new_token_ids
        if output.new_logprobs:
            logprobs.append(output.new_logprobs[:3])
    last = outputs[-1]
    last.prefill_stats = outputs[0].prefill_stats
    last.new_token_ids = tokens
    if logprobs:
        candidates, values, ranks = map(np.concatenate, zip(*logprobs, strict=True))
        last.new_logprobs = LogprobsLists(candidates, values, ranks)
    return last


def run_core(config: VllmConfig, addresses: EngineZmqAddresses, started: Future[_Core]) -> None:
    """Run a core until the core fails.

    The `AsyncLLM` detects the failure; its calls then raise vLLM's EngineDeadError.
    """
    try:
        # Pass a copy, because the core changes its configuration at startup.
        core = _Core(pickle.loads(cloudpickle.dumps(config)), addresses)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(core)
    try:
        core.run_busy_loop()
    except SystemExit:
        pass  # raised by the loop when the loop is asked to end
    except BaseException:
        # vLLM's EngineDeadError refers to a traceback that vLLM does not print
        traceback.print_exc()
        core._send_engine_dead()
    finally:
        core.shutdown()
