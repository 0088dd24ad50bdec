"""Checks `--vllm.engine_args`: every vLLM argument is allowed except those in `REFUSED`.

`rollout/engine_check.py` then lets vLLM validate the names and types of the arguments.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, cast

from openrlhf.config import machine
from openrlhf.config.flags import flags_of
from openrlhf.config.rollout import RolloutConfig, VLLMConfig

# Refused arguments (names or patterns), keyed by the alternative or the reason for the refusal.
REFUSED: dict[str, tuple[str, ...]] = {
    "use --actor.model_name_or_path or --model.model_name_or_path, with a folder for a revision": (
        "model",
        "model_weights",
        "tokenizer",
        "served_model_name",
        "hf_config_path",
        "revision",
        "code_revision",
        "tokenizer_revision",
    ),
    "use --model.trust_remote_code": ("trust_remote_code",),
    "use --vllm.quantization": ("quantization_config",),
    "use --data.max_len": ("max_model_len",),
    "use --train.seed": ("seed",),
    "use --rollout.stop": ("skip_tokenizer_init",),
    "use --rollout.temperature, .top_p, .top_k and .stop_token_ids": (
        "generation_config",
        "override_generation_config",
    ),
    "use --vllm.tensor_parallel_size": ("distributed_executor_backend",),
    "use --vllm.enable_sleep": ("enable_sleep_mode",),
    "use --ds.lora.rank": (
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "lora_dtype",
        "lora_target_modules",
    ),
    "use --vllm.engine_args with speculative_config": (
        "spec_method",
        "spec_model",
        "spec_tokens",
    ),
    "the engine's model would differ from the trainer's": (
        "hf_overrides",
        "model_class_overrides",
        "config_format",
        "disable_sliding_window",
    ),
    "the engine would generate no tokens": (
        "runner",
        "convert",
        "pooler_config",
        "diffusion_config",
    ),
    "log-probabilities would not match the distribution that samples are drawn from": (
        "logits_processors",
        "watermark_config",
        "logprobs_mode",
    ),
    "the engine's log-probabilities would differ from the trainer's": (
        "override_attention_dtype",
        "calculate_kv_scales",
        "kv_cache_dtype",
    ),
    "other formats are quantized or are not the format of a model folder": ("load_format",),
    "new weights could not be published": (
        "worker_cls",
        "worker_extension_cls",
        "weight_transfer_config",
        "enable_eplb",
        "cpu_offload_*",
        "offload_*",
    ),
    "a second cache may keep keys and values of older weights": (
        "kv_transfer_config",
        "kv_offloading_*",
        "ec_transfer_config",
    ),
    "--vllm.num_engines determines which devices engines use": (
        "data_parallel_*",
        "*_context_parallel_size",
        "nnodes",
        "node_rank",
        "master_*",
        "device_ids",
        "enable_elastic_ep",
    ),
}
# Quantization methods that vLLM itself applies when it receives new weights.
ROUNDED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
LOOKED_UP = ("ngram", "ngram_gpu")  # speculative decoding methods that need no draft model


def drafting(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `speculative_config` in these arguments, with vLLM's spelling of keys, or {}."""
    given = extra.get("speculative_config")
    if not isinstance(given, dict):
        return {}
    drafts = cast("dict[str, Any]", given)
    return {name.replace("-", "_"): value for name, value in drafts.items()}


def engine_args_violations(vllm: VLLMConfig, rollout: RolloutConfig, longest: int) -> Iterator[str]:
    """Yield violations of the rules for `--vllm.engine_args` and `--vllm.quantization`.

    Arguments that have their own flag are refused, as are arguments that log-probabilities, seeds
    or weight publication depend on. `longest` is the maximum combined number of tokens in a prompt
    and its response.
    """
    extra = vllm.engine_args
    roundings = ROUNDED
    if not machine.count_gpus():
        roundings = ("fp8_per_channel",)  # CPU builds lack the kernels for the other methods
    if vllm.quantization and vllm.quantization not in roundings:
        yield (
            "<vllm.quantization> is not supported for published weights on this machine: use "
            f"{' or '.join(roundings)}."
        )
    for name in extra:
        if name in flags_of(VLLMConfig):
            yield f"--vllm.engine_args may not set {name}: use --vllm.{name}."
        for why, patterns in REFUSED.items():
            if any(fnmatch(name, pattern) for pattern in patterns):
                yield f"--vllm.engine_args may not set {name}: {why}."
    yield from _drafting_violations(drafting(extra), seeded=rollout.seeded == "on")
    # vLLM rewinds a sample's random generator, which is not possible with a CPU generator.
    if rollout.seeded == "on" and not machine.count_gpus() and _prefills_in_chunks(extra, longest):
        yield (
            "--vllm.engine_args: CPUs cannot combine chunked prefill with seeded samples. Leave "
            "out enable_chunked_prefill, set max_num_batched_tokens to at least <data.max_len>, or "
            "use --rollout.seeded off."
        )


def _prefills_in_chunks(extra: Mapping[str, Any], longest: int) -> bool:
    budget = extra.get("max_num_batched_tokens", longest)
    return bool(extra.get("enable_chunked_prefill")) or (
        isinstance(budget, int) and budget < longest
    )


def _drafting_violations(drafts: Mapping[str, Any], *, seeded: bool) -> Iterator[str]:
    """Yield violations of the rules for a `speculative_config`."""
    name = "--vllm.engine_args speculative_config"
    if drafts and drafts.get("method") not in LOOKED_UP:
        yield (
            f"{name} has the method {drafts.get('method')!r}, whose draft model would be neither "
            "trained nor published. Use a method without a draft model: "
            f"{' or '.join(LOOKED_UP)}."
        )
    if drafts.get("rejection_sample_method") == "synthetic":
        yield (
            f"{name}: with rejection_sample_method synthetic, log-probabilities do not match the "
            "distribution that samples are drawn from. Leave it out."
        )
    if seeded and drafts.get("num_speculative_tokens_per_batch_size"):
        yield (
            f"{name}: with num_speculative_tokens_per_batch_size, a sample depends on the rest of "
            "the batch and not only on its seed. Use num_speculative_tokens, or --rollout.seeded "
            "off."
        )
