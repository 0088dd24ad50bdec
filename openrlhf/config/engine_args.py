"""Check of `--vllm.engine_args`: every vLLM argument is allowed except those in `engine_args.toml`.

`rollout/engine_check.py` then lets vLLM validate the names and types of the arguments.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, cast

from openrlhf.config import machine
from openrlhf.config.flags import flags_of, tables
from openrlhf.config.rollout import RolloutConfig, VLLMConfig

# What to do instead of setting an argument, or why it may not be set, by name pattern.
REFUSED = {name: f"use --vllm.{name}" for name in flags_of(VLLMConfig)}
REFUSED |= tables(__file__)["refused"]
# Quantization methods that vLLM applies itself when it receives new weights.
ROUNDED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
LOOKED_UP = ("ngram", "ngram_gpu")  # speculative decoding methods that need no draft model


def drafting(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `speculative_config` in these vLLM arguments, with keys as vLLM spells them, or
    {}.
    """
    given = extra.get("speculative_config")
    if not isinstance(given, dict):
        return {}
    drafts = cast("dict[str, Any]", given)
    return {name.replace("-", "_"): value for name, value in drafts.items()}


def engine_args_violations(vllm: VLLMConfig, rollout: RolloutConfig, longest: int) -> Iterator[str]:
    """Yield violations in `--vllm.engine_args` and `--vllm.quantization`.

    Arguments that have their own flag are refused, as are arguments that log-probabilities, seeds
    or weight publication depend on. `longest`: maximum tokens of a prompt and its response
    together.
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
        for pattern, why in REFUSED.items():
            if fnmatch(name, pattern):
                yield f"--vllm.engine_args may not set {name}: {why}."
    yield from _drafting_violations(drafting(extra), seeded=rollout.seeded == "on")
    # vLLM rewinds the random generator of a sample, which a CPU generator cannot do.
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
    """Yield violations in a `speculative_config`."""
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
