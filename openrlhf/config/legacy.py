"""Flat names and old values of earlier releases, translated to today's flags with a notice each.

An entry counts where its targets are flags of the command, so a table serves several commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from openrlhf.config.flags import Flag


def _under(section: str, names: str) -> dict[str, str]:
    """Old names that are today's leaf in a section; `old=new` where the leaf changed too."""
    pairs = [name.partition("=")[::2] for name in names.split()]
    return {old: f"{section}.{new or old}" for old, new in pairs}


SHARED: dict[str, str] = (
    _under("ckpt", "save_path=output_dir save_steps ckpt_path=path max_ckpt_num=max_num")
    | _under("ckpt", "max_ckpt_mem=max_mem best_metric_key save_hf_ckpt=save_hf")
    | _under("ckpt", "disable_ds_ckpt=disable_ds load_checkpoint=load_enable")
    | _under("logger", "logging_steps use_wandb=wandb.key wandb_org=wandb.org")
    | _under("logger", "wandb_group=wandb.group wandb_project=wandb.project")
    | _under("logger", "wandb_run_name=wandb.run_name use_tensorboard=tensorboard_dir")
    | _under("eval", "eval_steps=steps eval_dataset=dataset eval_split=split")
    | _under("train", "micro_train_batch_size=micro_batch_size train_batch_size=batch_size")
    | _under("train", "max_epochs seed full_determinism=full_determinism_enable")
    | _under("ds", "zero_stage zpg adam_offload overlap_comm grad_accum_dtype deepcompile")
    | _under("ds", "param_dtype attn_implementation use_liger_kernel packing_samples")
    | _under("ds", "load_in_4bit ring_attn_size ring_head_stride=ring_attn_head_stride")
    | _under("ds", "use_ds_universal_ckpt=use_universal_ckpt universal_ckpt=use_universal_ckpt")
    | _under("ds", "ds_tensor_parallel_size=tensor_parallel_size torch_compile value_head_prefix")
    | _under("ds", "value_prefix_head=value_head_prefix head_prefix=value_head_prefix")
    | _under("ds.lora", "lora_rank=rank lora_alpha=alpha lora_dropout=dropout target_modules")
    | _under("data", "disable_fast_tokenizer dataloader_num_workers max_len max_samples input_key")
    | _under("data", "output_key label_key prompt_key chosen_key rejected_key input_template")
    | _under("data", "apply_chat_template tokenizer_chat_template multiturn dataset")
    | _under("data", "dataset_probs dataset_split train_split=dataset_split")
)

OFFLINE: dict[str, str] = (
    {
        "learning_rate": "adam.lr",
        "adam_betas": "adam.betas",
        "l2": "adam.weight_decay",
        "ref_pretrain": "ref.model_name_or_path",
        "ref_offload": "ref.offload",
        "desirable_loss_weight": "kto.desirable_weight",
        "undesirable_loss_weight": "kto.undesirable_weight",
        "teacher_model": "kd.teacher_model",
        "teacher_offload": "kd.teacher_offload",
        "kd_coef": "kd.coef",
        "placeholder_token": "prm.placeholder_token",
        "reward_tokens": "prm.reward_tokens",
    }
    | _under("model", "pretrain=model_name_or_path pretrain_mode=pretrain_mode_enable")
    | _under("model", "gradient_checkpointing=gradient_checkpointing_enable")
    | _under("model", "gradient_checkpointing_use_reentrant=gradient_checkpointing_reentrant")
    | _under("model", "aux_loss_coef balancing_loss_coef=aux_loss_coef nll_loss_coef beta")
    | _under("model", "label_smoothing ipo=ipo_enable loss=loss_type")
    | _under("model", "margin_loss=margin_loss_enable")
    | _under("model", "compute_fp32_loss=compute_fp32_loss_enable")
    | {
        f"actor.{leaf}": f"model.{leaf}"
        for leaf in (
            "model_name_or_path",
            "gradient_checkpointing_enable",
            "gradient_checkpointing_reentrant",
            "pretrain_mode_enable",
            "aux_loss_coef",
        )
    }
)

ROLES = ("actor", "critic", "ref", "reward")
RL: dict[str, str] = (
    {f"{role}_num_nodes": f"{role}.num_nodes" for role in ROLES}
    | {f"{role}_num_gpus_per_node": f"{role}.num_gpus_per_node" for role in ROLES}
    | {
        "pretrain": "actor.model_name_or_path",
        "reward_pretrain": "reward.model_name_or_path",
        "critic_pretrain": "critic.model_name_or_path",
        "remote_rm_url": "reward.remote_url",
        "ref_reward_offload": "ref.offload reward.offload",
        "deepspeed_enable_sleep": "ds.enable_sleep",
        "eval_temperature": "eval.temperature",
        "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
        "actor_learning_rate": "actor.adam.lr",
        "critic_learning_rate": "critic.adam.lr",
        "adam_betas": "actor.adam.betas critic.adam.betas",
        "l2": "actor.adam.weight_decay critic.adam.weight_decay",
        "dynamic_filtering": "algo.dynamic_filtering_enable",
        "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    }
    | {
        name: f"actor.{name} critic.{name}"
        for name in ("max_norm", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")
    }
    | _under("train", "colocate_actor_ref colocate_critic_reward colocate_all_models=colocate_all")
    | _under(
        "train", "train_max_tokens_per_gpu=max_tokens_per_gpu num_episodes enable_ema ema_beta"
    )
    | _under("train", "use_dynamic_batch=dynamic_batch_enable async_train=async_enable")
    | _under("train", "async_queue_size partial_rollout=partial_rollout_enable agent_func_path")
    | _under("vllm", "vllm_num_engines=num_engines vllm_tensor_parallel_size=tensor_parallel_size")
    | _under("vllm", "vllm_sync_backend=sync_backend vllm_sync_with_ray=sync_with_ray")
    | _under("vllm", "vllm_enable_sleep=enable_sleep enable_prefix_caching enforce_eager")
    | _under("vllm", "vllm_gpu_memory_utilization=gpu_memory_utilization")
    | _under("data", "prompt_data=prompt_dataset prompt_data_probs=prompt_probs prompt_split")
    | _under("data", "image_key max_images_per_prompt")
    | _under("rollout", "rollout_batch_size=batch_size micro_rollout_batch_size=micro_batch_size")
    | _under("rollout", "vllm_generate_batch_size n_samples_per_prompt max_new_tokens temperature")
    | _under("rollout", "top_p rollout_max_tokens_per_gpu=max_tokens_per_gpu")
    | _under("algo.advantage", "advantage_estimator=estimator gamma lambd")
    | _under("algo.advantage", "no_advantage_std_norm=no_std_norm")
    | _under("algo.advantage", "enable_vllm_is_correction=is_correction_enable")
    | _under("algo.advantage", "vllm_is_truncated_threshold=is_correction_threshold")
    | _under("algo.advantage", "vllm_is_correction_type=is_correction_type")
    | _under("algo.kl", "init_kl_coef=init_coef kl_target=target kl_horizon=horizon")
    | _under("algo.kl", "kl_estimator=estimator use_kl_loss=use_loss")
    | _under("algo.ptx", "pretrain_data=dataset pretrain_data_probs=probs pretrain_split=split")
    | _under("algo.ptx", "ptx_coef=coef")
    | _under("actor", "eps_clip eps_clip_low_high dual_clip policy_loss_type freeze_visual_encoder")
    | _under("actor", "aux_loss_coef balancing_loss_coef=aux_loss_coef")
    | _under("actor", "entropy_loss_coef=entropy_coef")
    | _under("actor", "gradient_checkpointing=gradient_checkpointing_enable")
    | _under("actor", "gradient_checkpointing_use_reentrant=gradient_checkpointing_reentrant")
    | _under("critic", "value_clip save_value_network freezing_actor_steps=freezing_steps")
    | _under("reward", "normalize_reward=normalize_enable reward_clip_range=clip_range")
    | _under("reward", "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef")
)

# Old switches that are a value of a flag today.
VALUES: dict[str, tuple[str, str]] = {
    "bf16": ("ds.param_dtype", "bf16"),
    "flash_attn": ("ds.attn_implementation", "flash_attention_2"),
    "use_kl_estimator_k3": ("algo.kl.estimator", "k3"),
    "use_icepop": ("algo.advantage.is_correction_type", "icepop"),
}

IGNORED: dict[str, str] = {
    "perf": "times are always measured",
    "actor_init_on_gpu": "models are loaded where they train",
    "disable_trace_cache": "the trace of ZeRO 3 needs no switch",
    "to_bettertransformer": "attention is chosen by --ds.attn_implementation",
    "critic_train_remote": "the critic always trains beside the policy",
}

REMOVED: dict[str, str] = {
    "colocate_actor_critic": "Use --train.colocate_all to share devices between all models.",
    "colocate_ref_reward": "Use --train.colocate_actor_ref or --train.colocate_all.",
    "inference_tp_size": "Engines generate now: --vllm.tensor_parallel_size.",
    "load_model": "Raw weights are not read; give a model folder by model_name_or_path.",
    "save_hf_model": "Every run exports to --ckpt.output_dir; with checkpoints: --ckpt.save_hf.",
    "sft_model_path": "Raw weights are not read; give a model folder by model_name_or_path.",
    "reward_model_path": "Raw weights are not read; give a folder: --reward.model_name_or_path.",
    "bos_token": "Special tokens are those of the tokenizer in the model's folder.",
    "eos_token": "Special tokens are those of the tokenizer in the model's folder.",
    "pad_token": "Special tokens are those of the tokenizer in the model's folder.",
    "unk_token": "Special tokens are those of the tokenizer in the model's folder.",
    "enable_dt": "Conditional SFT is a post-processor now: batch_inference --csft.enable.",
    "dt_prompt": "Conditional SFT is a post-processor now: batch_inference --csft.prompt.",
    "enable_ca": "Conditional SFT is a post-processor now: batch_inference --csft.enable.",
    "ca_prompt": "Conditional SFT is a post-processor now: batch_inference --csft.prompt.",
    "unpaired_preference": "train_kto takes rows with a label: --data.label_key.",
    "vanilla_loss": "train_kto has one loss; weigh its sides with --kto.desirable_weight.",
    "teacher_peft_model": "Merge the adapter first: openrlhf.cli.lora_combiner.",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """A flag as typed and the values after it; no `name`: what precedes all flags."""

    name: str
    values: tuple[str, ...]
    inline: bool = False  # --name=value

    @property
    def tokens(self) -> list[str]:
        """The words of a command line again."""
        if self.inline:
            return [f"--{self.name}={self.values[0]}", *self.values[1:]]
        return [f"--{self.name}", *self.values] if self.name else list(self.values)


@dataclass(kw_only=True)
class Translation:
    """A command line in today's names."""

    argv: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])
    violations: list[str] = field(default_factory=list[str])


def aliases(flags: Mapping[str, Flag], *, command: str) -> dict[str, tuple[str, ...]]:
    """The old names a command understands, with the flags that take their values."""
    table = SHARED | (RL if command.startswith("train_ppo") else OFFLINE)
    if "kto.beta" in flags:
        table = table | {"beta": "kto.beta"}
    known = {old: tuple(new.split()) for old, new in table.items() if old not in flags}
    return {old: new for old, new in known.items() if all(path in flags for path in new)}


def translate(argv: Sequence[str], flags: Mapping[str, Flag], *, command: str) -> Translation:
    """The command line with old names replaced. What no alias covers stays as it is."""
    known = aliases(flags, command=command)
    result = Translation()
    for group in _lengths(list(_groups(argv)), flags, result):
        name = group.name
        if name in flags:
            result.argv += group.tokens
        elif name in known:
            for path in known[name]:
                result.argv += replace(_one_sided(group), name=path).tokens
            result.notices.append(f"--{name} is now {' and '.join('--' + p for p in known[name])}.")
        elif name in VALUES and VALUES[name][0] in flags:
            path, value = VALUES[name]
            result.argv += [f"--{path}", value]
            result.notices.append(f"--{name} is now --{path} {value}.")
        elif name in IGNORED:
            result.notices.append(f"--{name} has no effect any more: {IGNORED[name]}.")
        elif name in REMOVED:
            result.violations.append(f"--{name} is gone. {REMOVED[name]}")
        else:
            result.argv += group.tokens
    return result


def _groups(argv: Sequence[str]) -> Iterable[Group]:
    starts = [index for index, token in enumerate(argv) if token.startswith("--")]
    yield Group(name="", values=tuple(argv[: starts[0] if starts else len(argv)]))
    for start, end in zip(starts, [*starts[1:], len(argv)], strict=False):
        name, equals, value = argv[start].removeprefix("--").partition("=")
        rest = tuple(argv[start + 1 : end])
        yield Group(name=name, values=(value, *rest) if equals else rest, inline=bool(equals))


def _one_sided(group: Group) -> Group:
    """The threshold of 0.8.9 to 0.9.0 was one number, an upper bound."""
    if group.name == "vllm_is_truncated_threshold" and len(group.values) == 1:
        return replace(group, values=("0", *group.values), inline=False)
    return group


def _lengths(
    groups: list[Group], flags: Mapping[str, Flag], result: Translation
) -> Iterable[Group]:
    """`prompt_max_len` and `generate_max_len` (1024 each where not given) as total and response."""
    old = {
        group.name: group
        for group in groups
        if group.name in ("prompt_max_len", "generate_max_len")
    }
    if not old or "rollout.max_new_tokens" not in flags:
        return groups
    numbers = {name: group.values[0] if group.values else "" for name, group in old.items()}
    if not all(number.isdigit() for number in numbers.values()):
        result.violations += [
            f"--{name} takes a whole number, not {n!r}." for name, n in numbers.items()
        ]
        return [group for group in groups if group.name not in old]
    response = int(numbers.get("generate_max_len", "1024"))
    total = int(numbers.get("prompt_max_len", "1024")) + response
    result.notices.append(
        f"--prompt_max_len and --generate_max_len are now --data.max_len {total} (prompt and "
        f"response) and --rollout.max_new_tokens {response}."
    )
    kept = [group for group in groups if group.name not in old]
    return [
        kept[0],
        Group(name="data.max_len", values=(str(total),)),
        Group(name="rollout.max_new_tokens", values=(str(response),)),
        *kept[1:],
    ]
