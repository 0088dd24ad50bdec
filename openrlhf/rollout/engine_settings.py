"""Settings for a rollout engine, and the vLLM arguments and environment derived from them.

This module imports no heavy library.
"""

import os
from dataclasses import dataclass
from typing import Any, Literal

from openrlhf.config.machine import cluster_settings, count_gpus, kernel_caches
from openrlhf.config.rollout import VLLMConfig
from openrlhf.rollout.engine_versions import runner_environment
from openrlhf.units import GIB

Device = Literal["cpu", "cuda"]
TORCH_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
ADAPTER_ID = 1  # id of the only adapter that an engine serves
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values accepted by vLLM's max_lora_rank
CPU_KV_CACHE_BYTES = GIB  # vLLM's own default zero-fills most of the machine's memory


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings shared by all engines of a run."""

    model: str  # folder or Hub name
    vllm: VLLMConfig  # `engine_args` overrides the arguments derived from other settings
    max_model_len: int  # maximum length of prompt and response together, in tokens
    seed: int = 0  # seed for samples without a seed of their own; the engine's index is added
    device: Device = "cpu"
    seeded: bool = True  # True if samples may have seeds
    stop_strings: bool = False  # True if samples may have stop strings, which need a tokenizer
    end_token_ids: tuple[int, ...] = ()  # end tokens in addition to those in generation_config.json
    trust_remote_code: bool = False
    lora_rank: int = 0  # rank of the published adapter; 0 if full weights are published


def engine_device() -> Device:
    """Return the device type for engines: "cuda", or "cpu" if there is no GPU."""
    if count_gpus():
        return "cuda"
    return "cpu"


def engine_environment(device: Device) -> dict[str, str]:
    """Return the environment variables for an engine's process.

    These variables must be set before torch and vLLM are imported.
    """
    environment = cluster_settings() | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cuda":
        return environment | runner_environment() | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    environment |= kernel_caches()
    return environment | {
        # A node may have GPUs that Ray does not manage.
        "CUDA_VISIBLE_DEVICES": "",
        # With two spin-waiting threads on two cores, the engine would be 10 to 25 times slower.
        "OMP_NUM_THREADS": "1",
        # Keep vLLM from compiling its log-probability helper at the first sample (2 to 12 s).
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM's "auto" setting binds every engine to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Keep vLLM from adding a process between the core and the worker.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def engine_arguments(settings: EngineSettings, index: int) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `AsyncEngineArgs` for engine number `index`."""
    vllm = settings.vllm
    on_cpu = settings.device == "cpu"
    executor = "mp"
    if vllm.devices == 1:
        executor = "uni"
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": TORCH_NAMES[vllm.dtype],
        "max_model_len": settings.max_model_len,
        "seed": settings.seed + index,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "pipeline_parallel_size": vllm.pipeline_parallel_size,
        "distributed_executor_backend": executor,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enforce_eager": vllm.enforce_eager or on_cpu,
        "quantization": vllm.quantization,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "trust_remote_code": settings.trust_remote_code,
        "logprobs_mode": "processed_logprobs",  # log-probabilities of the sampling distribution
        "skip_tokenizer_init": not settings.stop_strings,
        "worker_extension_cls": "openrlhf.rollout.engine_worker.WorkerExtension",
        "enable_sleep_mode": vllm.enable_sleep and not on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments["block_size"] = 32  # in tokens; the default of 128 would cache few prefixes
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        # Use vLLM's own kernels, because nothing is compiled.
        arguments["compilation_config"] = {"custom_ops": ["all"]}
        if settings.seeded:
            # With chunked prefill, vLLM rewinds the generator of a seeded sample.
            # CPU generators cannot be rewound, so the engine would die.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(2048, settings.max_model_len)
    if settings.lora_rank:
        arguments["enable_lora"] = True
        arguments["max_lora_rank"] = min(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
    return arguments | dict(vllm.engine_args)
