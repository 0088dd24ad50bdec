"""Which arguments of vLLM's may be given with `--vllm.engine_args`: all but those in
`engine_args.toml`.

Whether vLLM knows the others, and their types, is asked of vLLM itself: `rollout/engine_check.py`.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, cast

from openrlhf.config import machine
from openrlhf.config.effects import Sentences
from openrlhf.config.flags import flags_of, tables
from openrlhf.config.rollout import RolloutConfig, VLLMConfig

TABLES = tables(__file__)
# The flag of ours that sets an argument.
FLAGS = TABLES["flags"] | {name: f"vllm.{name}" for name in flags_of(VLLMConfig)}
REASONS = TABLES["reasons"]  # why an argument, or all that match a pattern, may not be set
# Quantisations that vLLM makes of new weights itself.
ROUNDED = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
LOOKED_UP = ("ngram", "ngram_gpu")  # methods of drafting that need no second model


def drafting(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The `speculative_config` among arguments of vLLM's, its names as vLLM reads them; empty where
    there is none.
    """
    given = extra.get("speculative_config")
    named = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    return {name.replace("-", "_"): value for name, value in named.items()}


# fmt: off
def engine_args_mistakes(vllm: VLLMConfig, rollout: RolloutConfig, longest: int) -> Sentences:
    """`--vllm.engine_args` sets nothing that has a flag, or that log-probabilities, seeds and
    publication rest on.
    """
    extra = vllm.engine_args
    owned = [f"{name} (use --{FLAGS[name]})" for name in extra if name in FLAGS]
    refused = [f"{name}, because {why}" for name in extra for names, why in REASONS.items() if fnmatch(name, names)]
    drafts = drafting(extra)
    seeded = rollout.seeded == "on"
    rewinds = seeded and not machine.count_gpus()  # a sample's generator, where a prompt is prefilled in parts
    budget = extra.get("max_num_batched_tokens", longest)
    roundings = ROUNDED if machine.count_gpus() else ("fp8_per_channel",)  # the others' kernels are not in CPU builds
    quantization = vllm.quantization
    return [
        (quantization and quantization not in roundings,
         "<vllm.quantization> cannot be made of the weights that a run publishes, or not on this machine: use "
         f"{' or '.join(roundings)}."),
        (owned, f"--vllm.engine_args sets what has a flag of its own: {', '.join(owned)}."),
        (refused, f"--vllm.engine_args may not set {'; nor '.join(refused)}."),
        (drafts and drafts.get("method") not in LOOKED_UP,
         f"--vllm.engine_args speculative_config has the method {drafts.get('method')!r}: the weights of a draft model "
         f"would be neither trained nor published. Look drafts up: {' or '.join(LOOKED_UP)}."),
        (drafts.get("rejection_sample_method") == "synthetic",
         "--vllm.engine_args speculative_config: with rejection_sample_method synthetic samples would be drawn from "
         "another distribution than their log-probabilities say. Leave it out."),
        (seeded and drafts.get("num_speculative_tokens_per_batch_size"),
         "--vllm.engine_args speculative_config: with num_speculative_tokens_per_batch_size a sample depends on what else "
         "is in the batch, and not only on its seed. Use num_speculative_tokens, or --rollout.seeded off."),
        (rewinds and (extra.get("enable_chunked_prefill") or (isinstance(budget, int) and budget < longest)),
         "--vllm.engine_args: if vLLM prefills a seeded sample in parts, it rewinds the sample's random generator. The "
         "generator of a CPU cannot be rewound, and the engine dies. Leave out enable_chunked_prefill, give "
         "max_num_batched_tokens at least the tokens of <data.max_len>, or use --rollout.seeded off."),
    ]
