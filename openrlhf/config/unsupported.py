"""Flags whose feature is not available yet, refused by name. Deleting a name here enables its feature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openrlhf.config.effects import look_up
from openrlhf.config.flags import by_name, flags_in, flags_of

# A flag, or a section, that is refused at any value but its default; and what to do instead.
NOT_YET = by_name("""
    ds.load_in_4bit ds.use_liger_kernel ds.deepcompile ds.torch_compile ds.nvme_path ds.enable_sleep: leave it out
    ds.experts_implementation actor.freeze_visual_encoder ref.offload reward.offload placement: leave it out
    train.async_enable train.partial_rollout_enable vllm.max_restarts vllm.sync_with_ray vllm.enable_sleep: leave it out
    ds.ring_attn_size: use 1 and a smaller --data.max_len
    ds.tensor_parallel_size: use 1 and --ds.zero_stage 3
    ds.lora.rank: train every weight: 0
    ds.adam_offload ds.param_offload: use --ds.zero_stage 3 on more GPUs
    ds.use_universal_ckpt: resume with as many processes as before
    ds.zpg: use 1
    optim actor.optim critic.optim: use adam
    use_ms: download the files first and give their paths
    data.max_images_per_prompt: use text prompts
    reward.process_model: use --reward.remote_url (a .py file or a server), or --reward.verifier
    train.colocate_all: use --train.colocate_actor_ref
    train.max_restarts: start again with --ckpt.load_enable
    vllm.tensor_parallel_size vllm.pipeline_parallel_size: use 1 and more --vllm.num_engines
""")


def is_refused(path: str, root: Any) -> bool:
    """Whether a flag, a section it is in, or the feature it belongs to is refused at any value but its default."""
    needed = [look_up(root, path, term) for need in flags_of(root.__class__)[path].needs for term in need.split("|")]
    paths = [path, *(found[0] for found in needed if found)]
    return any(part in NOT_YET for each in paths for part in _sections(each))


def _sections(path: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    return [path[:end] for end, sign in enumerate(f"{path}.") if sign == "."]


def refusals(config: Any) -> Iterator[tuple[str, str]]:
    """Path and sentence of each flag of a configuration whose feature is not available yet."""
    for flag, value in flags_in(config):
        for path in _sections(flag.path) if value != flag.default else []:
            if path in NOT_YET:
                yield flag.path, f"{flag.typed(value)} is not available yet: {NOT_YET[path]}."
