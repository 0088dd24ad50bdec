"""Check of `--vllm.engine_args`: all arguments of vLLM but those in `engine_args.toml` are allowed.

`rollout/engine_check.py` asks vLLM whether it has the arguments, and of which types.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, cast

from openrlhf.config import machine
from openrlhf.config.flags import flags_of, tables
from openrlhf.config.rollout import RolloutConfig, VLLMConfig

TABLES = tables(__file__)
# The flag that sets an argument of vLLM.
FLAGS = TABLES["flags"] | {name: f"vllm.{name}" for name in flags_of(VLLMConfig)}
REASONS = TABLES["reasons"]  # why arguments may not be set, by pattern of their names
# Quantizations that vLLM computes itself when it receives new weights.
ROUNDED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
LOOKED_UP = ("ngram", "ngram_gpu")  # methods of drafting without a draft model


def drafting(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `speculative_config` of vLLM arguments with vLLM's names, or an empty one."""
    given = extra.get("speculative_config")
    if not isinstance(given, dict):
        return {}
    drafts = cast("dict[str, Any]", given)
    return {name.replace("-", "_"): value for name, value in drafts.items()}


def engine_args_violations(vllm: VLLMConfig, rollout: RolloutConfig, longest: int) -> Iterator[str]:
    """Yield what `--vllm.engine_args` and `--vllm.quantization` may not set.

    Arguments that have a flag are refused, and those that log-probabilities, seeds and publication
    rest on. `longest`: tokens of prompt and response.
    """
    extra = vllm.engine_args
    roundings = ROUNDED
    if not machine.count_gpus():
        roundings = ("fp8_per_channel",)  # the others' kernels are not in CPU builds
    if vllm.quantization and vllm.quantization not in roundings:
        yield (
            "<vllm.quantization> cannot be made of the weights that a run publishes, or not on "
            f"this machine: use {' or '.join(roundings)}."
        )
    owned = [f"{name} (use --{FLAGS[name]})" for name in extra if name in FLAGS]
    if owned:
        yield f"--vllm.engine_args sets what has a flag of its own: {', '.join(owned)}."
    refused: list[str] = []
    for name in extra:
        for pattern, why in REASONS.items():
            if fnmatch(name, pattern):
                refused.append(f"{name}, because {why}")
    if refused:
        yield f"--vllm.engine_args may not set {'; nor '.join(refused)}."
    yield from _drafting_violations(drafting(extra), seeded=rollout.seeded == "on")
    if rollout.seeded == "on" and not machine.count_gpus() and _prefills_in_parts(extra, longest):
        yield (
            "--vllm.engine_args: if vLLM prefills a seeded sample in parts, it rewinds the "
            "sample's random generator. The generator of a CPU cannot be rewound, and the engine "
            "dies. Leave out enable_chunked_prefill, give max_num_batched_tokens at least the "
            "tokens of <data.max_len>, or use --rollout.seeded off."
        )


def _prefills_in_parts(extra: Mapping[str, Any], longest: int) -> bool:
    budget = extra.get("max_num_batched_tokens", longest)
    return bool(extra.get("enable_chunked_prefill")) or (
        isinstance(budget, int) and budget < longest
    )


def _drafting_violations(drafts: Mapping[str, Any], *, seeded: bool) -> Iterator[str]:
    """Yield what is wrong with a `speculative_config`."""
    name = "--vllm.engine_args speculative_config"
    if drafts and drafts.get("method") not in LOOKED_UP:
        yield (
            f"{name} has the method {drafts.get('method')!r}: the weights of a draft model would "
            f"be neither trained nor published. Look drafts up: {' or '.join(LOOKED_UP)}."
        )
    if drafts.get("rejection_sample_method") == "synthetic":
        yield (
            f"{name}: with rejection_sample_method synthetic samples would be drawn from another "
            "distribution than their log-probabilities say. Leave it out."
        )
    if seeded and drafts.get("num_speculative_tokens_per_batch_size"):
        yield (
            f"{name}: with num_speculative_tokens_per_batch_size a sample depends on what else is "
            "in the batch, and not only on its seed. Use num_speculative_tokens, or "
            "--rollout.seeded off."
        )
