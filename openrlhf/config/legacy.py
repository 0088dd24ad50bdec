"""Flat names and old values of earlier releases, translated to today's flags with a notice.

An entry counts where its targets are flags of the command, so a table serves several commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from openrlhf.config.flags import Flag, by_name


def _table(text: str) -> dict[str, list[str]]:
    """Old names and the flags that take their values, from lines of a section and its names.

    `old` kept its last part, `old=new` changed it; `_old` had the section's name in front. The names of `actor+critic` belong to
    both sections, as far as a command has them.
    """
    table: dict[str, list[str]] = {}
    for sections, *names in map(str.split, text.strip().splitlines()):
        last = sections.rpartition(".")[2]
        for old, _, new in (name.partition("=") for name in names):
            paths = [f"{section}.{new or old.removeprefix('_')}" for section in sections.split("+")]
            table[last + old if old.startswith("_") else old] = paths
    return table


NAMES = _table("""
    ckpt         save_path=output_dir save_steps _path max_ckpt_num=max_num best_metric_key
    ckpt         max_ckpt_mem=max_mem save_hf_ckpt=save_hf disable_ds_ckpt=disable_ds
    ckpt         load_checkpoint=load_enable
    logger       logging_steps use_tensorboard=tensorboard_dir
    logger.wandb use_wandb=key _org _group _project _run_name
    eval         _steps _dataset _split
    train        micro_train_batch_size=micro_batch_size _batch_size max_epochs seed
    train        full_determinism=full_determinism_enable
    ds           zero_stage zpg adam_offload overlap_comm grad_accum_dtype deepcompile param_dtype
    ds           attn_implementation use_liger_kernel packing_samples load_in_4bit ring_attn_size
    ds           ring_head_stride=ring_attn_head_stride use_ds_universal_ckpt=use_universal_ckpt
    ds           universal_ckpt=use_universal_ckpt _tensor_parallel_size torch_compile
    ds           value_head_prefix value_prefix_head=value_head_prefix head_prefix=value_head_prefix
    ds.lora      _rank _alpha _dropout target_modules
    data         disable_fast_tokenizer dataloader_num_workers max_len max_samples input_key
    data         output_key label_key prompt_key chosen_key rejected_key input_template
    data         apply_chat_template tokenizer_chat_template multiturn dataset dataset_probs
    data         dataset_split train_split=dataset_split
    adam         learning_rate=lr
    reward       reward_pretrain=model_name_or_path normalize_reward=normalize_enable
    model        pretrain_mode=pretrain_mode_enable actor.pretrain_mode_enable=pretrain_mode_enable
    model        loss=loss_type margin_loss=margin_loss_enable
    model        compute_fp32_loss=compute_fp32_loss_enable
    model        actor.model_name_or_path=model_name_or_path actor.aux_loss_coef=aux_loss_coef
    model        actor.gradient_checkpointing_enable=gradient_checkpointing_enable
    model        actor.gradient_checkpointing_reentrant=gradient_checkpointing_reentrant
    model+actor  pretrain=model_name_or_path aux_loss_coef balancing_loss_coef=aux_loss_coef
    model+actor  gradient_checkpointing=gradient_checkpointing_enable
    model+actor  gradient_checkpointing_use_reentrant=gradient_checkpointing_reentrant
    adam+actor.adam+critic.adam _betas l2=weight_decay
""")
RL_NAMES = _table("""
    actor          _num_nodes _num_gpus_per_node eps_clip eps_clip_low_high dual_clip
    actor          policy_loss_type freeze_visual_encoder entropy_loss_coef=entropy_coef
    actor          _learning_rate=adam.lr
    critic         _num_nodes _num_gpus_per_node value_clip critic_pretrain=model_name_or_path
    critic         save_value_network freezing_actor_steps=freezing_steps _learning_rate=adam.lr
    actor+critic   max_norm lr_scheduler lr_warmup_ratio min_lr_ratio
    ref            _num_nodes _num_gpus_per_node
    reward         _num_nodes _num_gpus_per_node remote_rm_url=remote_url _clip_range
    reward         overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef
    ref+reward     ref_reward_offload=offload
    train          colocate_actor_ref colocate_critic_reward colocate_all_models=colocate_all
    train          num_episodes _max_tokens_per_gpu use_dynamic_batch=dynamic_batch_enable
    train          enable_ema ema_beta async_train=async_enable async_queue_size agent_func_path
    train          partial_rollout=partial_rollout_enable
    ds             deepspeed_enable_sleep=enable_sleep
    vllm           _num_engines _tensor_parallel_size _sync_backend _sync_with_ray enforce_eager
    vllm           _enable_sleep enable_prefix_caching _gpu_memory_utilization
    data           prompt_data=prompt_dataset prompt_data_probs=prompt_probs prompt_split image_key
    data           max_images_per_prompt dataset=prompt_dataset dataset_probs=prompt_probs
    eval           _temperature _n_samples_per_prompt
    rollout        _batch_size micro_rollout_batch_size=micro_batch_size temperature
    rollout        vllm_generate_batch_size n_samples_per_prompt max_new_tokens top_p
    rollout        _max_tokens_per_gpu
    algo           dynamic_filtering=dynamic_filtering_enable
    algo           dynamic_filtering_reward_range=dynamic_filtering_range
    algo.advantage _estimator gamma lambd no_advantage_std_norm=no_std_norm
    algo.advantage enable_vllm_is_correction=is_correction_enable
    algo.advantage vllm_is_truncated_threshold=is_correction_threshold
    algo.advantage vllm_is_correction_type=is_correction_type
    algo.kl        init_kl_coef=init_coef _target _horizon _estimator use_kl_loss=use_loss
    algo.ptx       pretrain_data=dataset pretrain_data_probs=probs pretrain_split=split _coef
""")

# Old switches that are a value of a flag today.
VALUES: dict[str, tuple[str, str]] = {
    "bf16": ("ds.param_dtype", "bf16"),
    "flash_attn": ("ds.attn_implementation", "flash_attention_2"),
    "use_kl_estimator_k3": ("algo.kl.estimator", "k3"),
    "use_icepop": ("algo.advantage.is_correction_type", "icepop"),
}

IGNORED = by_name("""
    perf: times are always measured
    actor_init_on_gpu: models are loaded where they train
    disable_trace_cache: the trace of ZeRO 3 needs no switch
    to_bettertransformer: attention is chosen by --ds.attn_implementation
    critic_train_remote: the critic always trains beside the policy
""")
REMOVED = by_name("""
    colocate_actor_critic: Use --train.colocate_all to share devices between all models.
    colocate_ref_reward: Use --train.colocate_actor_ref or --train.colocate_all.
    inference_tp_size: Engines generate now: --vllm.tensor_parallel_size.
    load_model sft_model_path: Raw weights are not read; give a model folder by model_name_or_path.
    reward_model_path: Raw weights are not read; give a model folder by --reward.model_name_or_path.
    save_hf_model: Every run exports to --ckpt.output_dir; with checkpoints: --ckpt.save_hf.
    bos_token eos_token pad_token unk_token: Special tokens are those of the tokenizer in the model's folder.
""")
# Names of other frameworks, which are answered with the flags that are meant.
ELSEWHERE = _table("""
    ds                          fp16=param_dtype
    adam+actor.adam+critic.adam lr learning_rate=lr
    data                        max_seq_length=max_len
    rollout                     num_generations=n_samples_per_prompt
    algo.kl                     kl_coef=init_coef
""")
OLD_LENGTHS = ("prompt_max_len", "generate_max_len")  # 1024 if not given
MOST_RENAMES = 3  # that a notice spells out
Group = tuple[str, list[str]]  # a flag as it is typed, without its dashes, and the words that follow it


@dataclass(kw_only=True)
class Translation:
    """A command line in today's names."""

    groups: list[Group] = field(default_factory=list[Group])
    notices: list[str] = field(default_factory=list[str])
    violations: list[str] = field(default_factory=list[str])


def aliases(flags: Mapping[str, Flag]) -> dict[str, list[str]]:
    """The old names that a command understands, with the flags that take their values."""
    return _known(NAMES | RL_NAMES if "algo.advantage.estimator" in flags else NAMES, flags)


def hints(flags: Mapping[str, Flag]) -> dict[str, list[str]]:
    """Names of older releases and of other frameworks, with the flags of a command that are meant."""
    return _known(ELSEWHERE, flags) | aliases(flags)


def _known(table: Mapping[str, list[str]], flags: Mapping[str, Flag]) -> dict[str, list[str]]:
    known = {name: [path for path in paths if path in flags] for name, paths in table.items() if name not in flags}
    return {name: paths for name, paths in known.items() if paths}


def translate(groups: Iterable[Group], flags: Mapping[str, Flag]) -> Translation:
    """The command line with old names replaced. What no alias covers stays as it is."""
    known, result = aliases(flags), Translation()
    renamed, lengths = dict[str, str](), dict[str, str]()
    for name, words in groups:
        path, value = VALUES.get(name, ("", ""))
        if name in known:
            if name == "vllm_is_truncated_threshold" and len(words) == 1:
                words = ["0", *words]  # it was an upper bound once
            result.groups += [(target, words) for target in known[name]]
            renamed[name] = " and ".join(f"--{target}" for target in known[name])
        elif words and (path in flags or name in IGNORED):
            result.violations.append(takes_no_value(f"--{name}", words, path))
        elif path in flags:
            result.groups.append((path, [value]))
            renamed[name] = f"--{path} {value}"
        elif name in IGNORED:
            result.notices.append(f"--{name} has no effect any more: {IGNORED[name]}.")
        elif name in REMOVED:
            result.violations.append(f"--{name} is gone. {REMOVED[name]}")
        elif name in OLD_LENGTHS and "rollout.max_new_tokens" in flags:
            lengths[name] = " ".join(words)
        else:
            result.groups.append((name, words))
    if lengths:
        renamed |= _translate_lengths(lengths, result)
    if renamed:
        result.notices.insert(0, _renames(renamed, flags))
    return result


def _renames(renamed: Mapping[str, str], flags: Mapping[str, Flag]) -> str:
    """One line for all old names."""
    if len(renamed) <= MOST_RENAMES:
        return "; ".join(f"--{old} is now {new}" for old, new in renamed.items()) + "."
    named = ", ".join(f"--{old}" for old in list(renamed)[:MOST_RENAMES])
    where = "config.yaml in the run folder has" if "run.dir" in flags else "--help lists"
    return f"{len(renamed)} flags have the names of older releases ({named}, ...): {where} today's names."


def takes_no_value(name: str, words: Sequence[str], path: str = "") -> str:
    """The sentence about a switch with words after it. `path`: the flag that takes a value."""
    instead = f"leave {' '.join(words)} out, or set --{path}" if path else f"leave {' '.join(words)} out"
    return f"{name} is a switch and takes no value, not even true or false: {instead}."


def is_old_name(name: str) -> bool:
    """Whether any command of an older release had this name."""
    return name in NAMES | RL_NAMES


def _translate_lengths(lengths: Mapping[str, str], result: Translation) -> dict[str, str]:
    """Add the flags of two old lengths to the groups; returns what became of them."""
    wrong = {name: text for name, text in lengths.items() if not text.isdigit()}
    result.violations += [f"--{name} takes a whole number, not {text!r}." for name, text in wrong.items()]
    if wrong:
        return {}
    prompt, response = (int(lengths.get(name, "1024")) for name in OLD_LENGTHS)
    total = prompt + response
    # First: today's names win.
    result.groups[:0] = [("data.max_len", [str(total)]), ("rollout.max_new_tokens", [str(response)])]
    today = f"--data.max_len {total} (prompt and response) and --rollout.max_new_tokens {response}"
    return {" and --".join(OLD_LENGTHS): today}
