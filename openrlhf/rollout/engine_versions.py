"""Differences between the supported vLLM versions, 0.24 to 0.32; docs/gpu.md lists all of them.

Differences are detected from vLLM's classes if possible, and otherwise from its version number.
vLLM is imported only inside functions.
"""

import asyncio
from collections import defaultdict
from typing import Any

from openrlhf.config.machine import installed


def runner_environment() -> dict[str, str]:
    """Return the environment variables that select a CUDA engine's model runner.

    vLLM 0.24 does not notify its second model runner of frozen samples.
    """
    vllm = installed("vllm")
    if vllm and vllm.version.startswith("0.24."):
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return {}


def refusals() -> tuple[type[Exception], ...]:
    """Return vLLM's exceptions for invalid requests, which are ValueErrors before vLLM 0.27."""
    from vllm import exceptions

    client_error = getattr(exceptions, "VLLMClientError", ValueError)
    return ValueError, TypeError, OverflowError, client_error


def check_reload(config: Any) -> None:
    """Raise ValueError if the model of a `VllmConfig` cannot load new weights.

    vLLM versions before 0.26 drop some buffers.
    """
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    if "kernel_non_persistent_buffers" in LayerReloadingInfo.__dataclass_fields__:
        return
    quantised = config.quant_config is not None
    sharded = config.parallel_config.tensor_parallel_size > 1
    if config.model_config.is_hybrid or (quantised and sharded):
        raise ValueError(
            "the installed vLLM cannot load new weights into models with linear attention, or into "
            "quantized models on several devices. Install vLLM 0.26 or later."
        )


def heed_seeds_on_cpu() -> None:
    """Make vLLM versions before 0.29 respect sample seeds on a CPU in every batch.

    vLLM versions before 0.29 ignore the seeds if the batch has greedy samples or samples without a
    seed.
    """
    from packaging.version import Version
    from vllm import __version__
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    if Version(__version__) < Version("0.29"):
        TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native


def adapter_renames(model: Any) -> Any:
    """Return vLLM's mapper from Transformers layer names to its own names for this model.

    Returns None if vLLM does not rename the model's layers.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        return mapper.get_rename_mapper()
    return mapper


def expert_kernel(quant_method: Any) -> Any:
    """Return the packed weights of a CPU engine's experts, or None if it has no packed experts.

    vLLM versions before 0.28 store the packed weights under a different name.
    """
    return getattr(quant_method, "moe_kernel", None) or getattr(quant_method, "cpu_fused_moe", None)


class SampledVersions:
    """Recorder of the weight versions that generated each request's tokens.

    vLLM before 0.32 discards these versions.
    """

    def __init__(self, llm: Any) -> None:
        """Start recording. `llm` is an `AsyncLLM` that has not received any request yet."""
        self._llm = llm
        self._version = 0
        self._seen: dict[str, dict[int, None]] = defaultdict(dict)  # versions by request, in order
        self._get_output = llm.engine_core.get_output_async
        llm.engine_core.get_output_async = self._get_counted_output

    async def _get_counted_output(self) -> Any:
        outputs = await self._get_output()
        requests = self._llm.output_processor.request_states
        for output in outputs.outputs:
            request = requests.get(output.request_id)  # None after the request was aborted
            if output.new_token_ids and request is not None:
                self._seen[request.external_req_id][self._version] = None
        return outputs

    async def switch(self, version: int) -> None:
        """Record `version` for tokens that arrive from now on.

        The engine must be paused and have sent all earlier tokens.
        """
        while not self._llm.engine_core.outputs_queue.empty() and not self._llm.errored:
            await asyncio.sleep(0)
        self._version = version

    def pop(self, request: str) -> tuple[int, ...]:
        """Remove and return the versions of a finished request."""
        return tuple(self._seen.pop(request, ()))
