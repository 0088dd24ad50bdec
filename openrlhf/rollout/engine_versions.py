"""What is done differently for vLLM 0.24 to 0.32, the supported versions. docs/gpu.md lists what
else differs.

A difference that can be seen in vLLM's classes is looked for there, the others go by vLLM's number.
Only the functions import vLLM.
"""

import asyncio
from collections import defaultdict
from typing import Any

from openrlhf.config.machine import installed


def runner_environment() -> dict[str, str]:
    """Environment variables of a CUDA engine. The second model runner of vLLM 0.24 is not told of
    frozen samples.
    """
    vllm = installed("vllm")
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"} if vllm and vllm.version.startswith("0.24.") else {}


def refusals() -> tuple[type[Exception], ...]:
    """Errors of vLLM's that concern the request. Below 0.27 all of them are ValueErrors."""
    from vllm import exceptions

    return (
        ValueError,
        TypeError,
        OverflowError,
        getattr(exceptions, "VLLMClientError", ValueError),
    )


def check_reload(config: Any) -> None:
    """Raise ValueError if the model of a `VllmConfig` cannot take in new weights: vLLM below 0.26
    drops some buffers.
    """
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    keeps_buffers = "kernel_non_persistent_buffers" in LayerReloadingInfo.__dataclass_fields__
    sharded = config.parallel_config.tensor_parallel_size > 1
    if not keeps_buffers and (
        config.model_config.is_hybrid or (config.quant_config is not None and sharded)
    ):
        raise ValueError(
            "the installed vLLM cannot take in new weights of models with linear attention, nor of quantised models on "
            "several devices: install vLLM 0.26 or later."
        )


def heed_seeds_on_cpu() -> None:
    """Make vLLM below 0.29 heed seeds on a CPU if the batch has samples without a seed, or greedy
    ones.
    """
    from packaging.version import Version
    from vllm import __version__
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    if Version(__version__) < Version("0.29"):
        TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native


def adapter_renames(model: Any) -> Any:
    """How vLLM renames the layers of a model with the names of Transformers; None for those that it
    leaves.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper


def expert_kernel(quant_method: Any) -> Any:
    """The packed weights of a CPU engine's experts; None if there are none. vLLM below 0.28 has
    another name for them.
    """
    return getattr(quant_method, "moe_kernel", None) or getattr(quant_method, "cpu_fused_moe", None)


class SampledVersions:
    """The weight versions that each request's tokens were sampled with. vLLM below 0.32 does not
    keep them.
    """

    def __init__(self, llm: Any) -> None:
        """Count from now on. `llm`: an `AsyncLLM` that has received nothing yet."""
        self._llm, self._version = llm, 0
        self._seen: dict[str, dict[int, None]] = defaultdict(dict)  # by request, in order
        self._take = llm.engine_core.get_output_async
        llm.engine_core.get_output_async = self._counted

    async def _counted(self) -> Any:
        outputs = await self._take()
        for output in outputs.outputs:
            request = self._llm.output_processor.request_states.get(
                output.request_id
            )  # None after an abort
            if output.new_token_ids and request is not None:
                self._seen[request.external_req_id][self._version] = None
        return outputs

    async def switch(self, version: int) -> None:
        """Tokens that arrive later have this version. The engine is paused, and has sent all tokens
        so far.
        """
        while not self._llm.engine_core.outputs_queue.empty() and not self._llm.errored:
            await asyncio.sleep(0)
        self._version = version

    def pop(self, request: str) -> tuple[int, ...]:
        """The versions of a request that has ended."""
        return tuple(self._seen.pop(request, ()))
