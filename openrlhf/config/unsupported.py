"""Flags whose feature is not there yet, refused by name. Deleting a line enables its feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openrlhf.config import choices
from openrlhf.config.flags import Flag, flags_in


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag or section that is refused at any value but its default, or where `when` says so."""

    path: str
    instead: str
    when: Callable[[Any], bool] | None = None  # gets the resolved root


def refuse(path: str, instead: str, when: Callable[[Any], bool] | None = None) -> Refusal:
    """One line of the table."""
    return Refusal(path=path, instead=instead, when=when)


CRITIC_FREE = "reinforce, reinforce_baseline, rloo, group_norm or dr_grpo"
OFF = "leave it out"
FUNCTION = "use --reward.remote_url with a .py file, or --reward.verifier math"

NOT_YET: tuple[Refusal, ...] = (
    # every command
    refuse("ds.ring_attn_size", "use 1 and a smaller --data.max_len"),
    refuse("ds.tensor_parallel_size", "use 1 and --ds.zero_stage 3"),
    refuse("ds.lora.rank", "train every weight: 0"),
    refuse("ds.load_in_4bit", OFF),
    refuse("ds.use_liger_kernel", OFF),
    refuse("ds.deepcompile", OFF),
    refuse("ds.torch_compile", OFF),
    refuse("ds.adam_offload", "use --ds.zero_stage 3 on more GPUs"),
    refuse("ds.param_offload", "use --ds.zero_stage 3 on more GPUs"),
    refuse("ds.nvme_path", OFF),
    refuse("ds.use_universal_ckpt", "resume with as many processes as before"),
    refuse("ds.zpg", "use 1"),
    refuse("ds.experts_implementation", OFF),
    refuse("optim", "use adam"),
    refuse("model.aux_loss_coef", "use 0"),
    refuse("use_ms", "download the files first and give their paths"),
    refuse("eval.patience", OFF),
    # RL: algorithm
    refuse(
        "algo.advantage.estimator",
        f"use {CRITIC_FREE}",
        when=lambda root: choices.ESTIMATORS[root.algo.advantage.estimator].needs_critic,
    ),
    refuse("algo.advantage.is_correction_enable", OFF),
    refuse("algo.correction", OFF),
    refuse("algo.kl.target", "use a fixed --algo.kl.init_coef"),
    refuse("algo.kl.stop_update", OFF),
    refuse("algo.kl.stop_run", OFF),
    refuse("algo.distill.teacher", OFF),
    refuse("algo.ptx.dataset", OFF),
    refuse("algo.dynamic_filtering_enable", OFF),
    refuse(
        "actor.policy_loss_type",
        "use ppo",
        when=lambda root: root.actor.policy_loss_type in ("gspo", "cispo"),
    ),
    refuse("actor.optim", "use adam"),
    refuse("actor.aux_loss_coef", "use 0"),
    refuse("actor.freeze_visual_encoder", OFF),
    refuse("data.max_images_per_prompt", "use text prompts"),
    refuse("train.enable_ema", OFF),
    # RL: rewards and agents
    refuse("reward.model_name_or_path", FUNCTION),
    refuse("reward.process_model", FUNCTION),
    refuse("reward.weights", OFF),
    refuse(
        "reward.verifier",
        FUNCTION,
        when=lambda root: root.reward.verifier not in (None, "math"),
    ),
    refuse("reward.remote_url", FUNCTION, when=lambda root: bool(root.reward.urls)),
    refuse(
        "reward.remote_url",
        "beside --reward.verifier, leave out one of them",
        when=lambda root: bool(root.reward.function_path and root.reward.verifier),
    ),
    refuse("train.agent_func_path", FUNCTION),
    # RL: engines and sampling
    refuse(
        "vllm.max_engines",
        "use as many as --vllm.num_engines",
        when=lambda root: root.vllm.max_engines != root.vllm.num_engines,
    ),
    refuse("vllm.tensor_parallel_size", "use 1 and more --vllm.num_engines"),
    refuse("vllm.pipeline_parallel_size", "use 1 and more --vllm.num_engines"),
    refuse("vllm.quantization", OFF),
    refuse("vllm.sync_with_ray", OFF),
    refuse("vllm.enable_sleep", OFF),
    refuse("ds.enable_sleep", OFF),
    refuse("rollout.stop", "end with the end-of-sequence token"),
    refuse("rollout.stop_token_ids", "end with the end-of-sequence token"),
    refuse("rollout.dump_dir", "episodes are in samples.jsonl of --run.dir"),
    refuse("rollout.replay_dir", OFF),
    refuse("rollout.only", OFF),
    refuse("rollout.remote_engines", OFF),
    # RL: placement and pipeline
    refuse("train.colocate_all", "use --train.colocate_actor_ref"),
    refuse("train.colocate_critic_reward", OFF),
    refuse("train.async_enable", OFF),
    refuse("train.partial_rollout_enable", OFF),
    refuse("train.max_restarts", "start again with --ckpt.load_enable"),
    refuse("placement", OFF),
)


def refusals(config: Any) -> Iterator[str]:
    """A sentence for each flag of a resolved configuration whose feature is not there yet."""
    flags = flags_in(config)
    for refusal in NOT_YET:
        for flag, value in flags:
            if not f"{flag.path}.".startswith(f"{refusal.path}."):
                continue
            if refusal.when(config) if refusal.when else value != flag.default:
                yield f"{_as_typed(flag, value)} is not available yet: {refusal.instead}."


def _as_typed(flag: Flag, value: Any) -> str:
    if flag.shape == "switch":
        return flag.name
    values = value if flag.shape in ("pair", "list") else [value]
    typed = " ".join(map(str, [flag.name, *values]))
    return f"{typed} (the default)" if value == flag.default else typed
