"""Flag names and values of earlier releases, and their replacements."""

# Old names that equal the last parts of a flag, without _enable: lora_rank is now --ds.lora.rank.
PARTS = (
    "save_steps", "ckpt_path", "best_metric_key", "logging_steps", "wandb_org", "wandb_group",
    "wandb_project", "wandb_run_name", "eval_steps", "eval_dataset", "eval_split",
    "train_batch_size", "max_epochs", "seed", "full_determinism", "zero_stage", "zpg",
    "adam_offload", "overlap_comm", "grad_accum_dtype", "deepcompile", "param_dtype",
    "attn_implementation", "use_liger_kernel", "packing_samples", "load_in_4bit", "ring_attn_size",
    "ds_tensor_parallel_size", "torch_compile", "value_head_prefix", "lora_rank", "lora_alpha",
    "lora_dropout", "target_modules", "disable_fast_tokenizer", "dataloader_num_workers", "max_len",
    "max_samples", "input_key", "output_key", "label_key", "prompt_key", "chosen_key",
    "rejected_key", "input_template", "apply_chat_template", "tokenizer_chat_template", "multiturn",
    "dataset_probs", "dataset_split", "pretrain_mode", "beta", "label_smoothing", "ipo",
    "nll_loss_coef", "ref_offload", "teacher_model", "teacher_offload", "kd_coef",
    "placeholder_token", "reward_tokens", "margin_loss", "compute_fp32_loss", "aux_loss_coef",
    "gradient_checkpointing", "adam_betas",
)  # fmt: skip

# Old names of RL commands that equal the last parts of a flag, without _enable.
RL_PARTS = (
    "actor_num_nodes", "actor_num_gpus_per_node", "eps_clip", "eps_clip_low_high", "dual_clip",
    "policy_loss_type", "freeze_visual_encoder", "critic_num_nodes", "critic_num_gpus_per_node",
    "value_clip", "save_value_network", "max_norm", "lr_scheduler", "lr_warmup_ratio",
    "min_lr_ratio", "ref_num_nodes", "ref_num_gpus_per_node", "reward_num_nodes",
    "reward_num_gpus_per_node", "reward_clip_range", "overlong_buffer_len",
    "overlong_penalty_factor", "stop_properly_penalty_coef", "colocate_actor_ref",
    "colocate_critic_reward", "num_episodes", "train_max_tokens_per_gpu", "enable_ema", "ema_beta",
    "async_queue_size", "agent_func_path", "partial_rollout", "vllm_num_engines",
    "vllm_tensor_parallel_size", "vllm_sync_backend", "vllm_sync_with_ray", "enforce_eager",
    "vllm_enable_sleep", "enable_prefix_caching", "vllm_gpu_memory_utilization", "prompt_split",
    "image_key", "max_images_per_prompt", "eval_temperature", "eval_n_samples_per_prompt",
    "rollout_batch_size", "vllm_generate_batch_size", "max_new_tokens", "top_p",
    "rollout_max_tokens_per_gpu", "dynamic_filtering", "advantage_estimator", "gamma", "lambd",
    "kl_target", "kl_horizon", "kl_estimator", "ptx_coef",
)  # fmt: skip

# Old names of batch_inference and interactive_chat that equal the last parts of a flag.
INFERENCE_PARTS = (
    "csft_prompt", "rollout_batch_size", "micro_batch_size", "max_new_tokens", "temperature",
    "top_p", "repetition_penalty", "enable_prefix_caching",
)  # fmt: skip

# Other old names, and the current flags that replace them. Each command uses its own flags.
NAMES = {
    "save_path": "ckpt.output_dir",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "load_checkpoint": "ckpt.load_enable",
    "use_tensorboard": "logger.tensorboard_dir",
    "use_wandb": "logger.wandb.key",
    "micro_train_batch_size": "train.micro_batch_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "universal_ckpt": "ds.use_universal_ckpt",
    "value_prefix_head": "ds.value_head_prefix",
    "head_prefix": "ds.value_head_prefix",
    "dataset": "data.dataset",
    "train_split": "data.dataset_split",
    "learning_rate": "adam.lr",
    "reward_pretrain": "reward.model_name_or_path",
    "normalize_reward": "reward.normalize_enable",
    "actor.pretrain_mode_enable": "model.pretrain_mode_enable",
    "ref_pretrain": "ref.model_name_or_path",
    "desirable_loss_weight": "kto.desirable_weight",
    "undesirable_loss_weight": "kto.undesirable_weight",
    "loss": "model.loss_type",
    "actor.model_name_or_path": "model.model_name_or_path",
    "actor.aux_loss_coef": "model.aux_loss_coef",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_reentrant": "model.gradient_checkpointing_reentrant",
    "pretrain": "model.model_name_or_path actor.model_name_or_path",
    "balancing_loss_coef": "model.aux_loss_coef actor.aux_loss_coef",
    "gradient_checkpointing_use_reentrant": (
        "model.gradient_checkpointing_reentrant actor.gradient_checkpointing_reentrant"
    ),
    "l2": "adam.weight_decay actor.adam.weight_decay critic.adam.weight_decay",
}

# Other old names that existed only in RL commands.
RL_NAMES = {
    "entropy_loss_coef": "actor.entropy_coef",
    "actor_learning_rate": "actor.adam.lr",
    "critic_pretrain": "critic.model_name_or_path",
    "freezing_actor_steps": "critic.freezing_steps",
    "critic_learning_rate": "critic.adam.lr",
    "remote_rm_url": "reward.remote_url",
    "ref_reward_offload": "ref.offload reward.offload",
    "colocate_all_models": "train.colocate_all",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "async_train": "train.async_enable",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "prompt_data": "data.prompt_dataset",
    "dataset": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "dataset_probs": "data.prompt_probs",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "temperature": "rollout.temperature",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "pretrain_data": "algo.ptx.dataset",
    "pretrain_data_probs": "algo.ptx.probs",
    "pretrain_split": "algo.ptx.split",
}

# Other old names that existed only in batch_inference and interactive_chat.
INFERENCE_NAMES = {
    "eval_task": "task",
    "ta_prompt": "preamble",
    "enable_csft": "csft.enable",
    "enable_ca": "csft.enable",
    "enable_dt": "csft.enable",
    "ca_prompt": "csft.prompt",
    "dt_prompt": "csft.prompt",
    "tp_size": "vllm.tensor_parallel_size",
}

# Names from other frameworks, which are refused with a message that suggests these flags.
ELSEWHERE = {
    "fp16": "ds.param_dtype",
    "lr": "adam.lr actor.adam.lr critic.adam.lr",
    "learning_rate": "adam.lr actor.adam.lr critic.adam.lr",
    "max_seq_length": "data.max_len",
    "num_generations": "rollout.n_samples_per_prompt",
    "kl_coef": "algo.kl.init_coef",
}

# Old switches or values, and the flag and value that replace each one.
# {} stands for the word after the switch.
SWITCHES = {
    "greedy_sampling": "rollout.temperature 0",
    "max_num_seqs": 'vllm.engine_args {"max_num_seqs":{}}',
    "bf16": "ds.param_dtype bf16",
    "flash_attn": "ds.attn_implementation flash_attention_2",
    "use_kl_estimator_k3": "algo.kl.estimator k3",
    "use_icepop": "algo.advantage.is_correction_type icepop",
    "post_processor=ca": "post_processor csft",
    "post_processor=dt": "post_processor csft",
    "post_processor=None": "post_processor none",
    "post_processor=null": "post_processor none",
}

# Switches and values that are accepted but have no effect, with the reason.
IGNORED = {
    "perf": "times are always measured",
    "actor_init_on_gpu": "models are always loaded on the device that trains them",
    "disable_trace_cache": "ZeRO 3 manages its trace cache by itself",
    "to_bettertransformer": "--ds.attn_implementation selects the attention",
    "critic_train_remote": "the critic always trains alongside the policy",
    "unpaired_preference": "each KTO row has a prompt, an answer and a label",
    "save_hf_model": "every run exports its final model to --ckpt.output_dir",
    "inference_tp_size=1": "vLLM engines generate the samples",
}

# Flags whose defaults have changed, and their defaults in older releases.
MOVED = {
    "algo.advantage.lambd": "0.95",
    "critic.value_clip": "0.2",
    "eval.split": "test",
    "ds.attn_implementation": "off",
    "ds.param_dtype": "off",
}

# Refused names, and what to use instead.
REMOVED = {
    "colocate_actor_critic": "Use --train.colocate_all to share devices between all models.",
    "colocate_ref_reward": "Use --train.colocate_actor_ref or --train.colocate_all.",
    "inference_tp_size": "vLLM engines now generate: use --vllm.tensor_parallel_size.",
    "load_model": (
        "Raw weight files are not supported: pass a model folder with model_name_or_path."
    ),
    "sft_model_path": (
        "Raw weight files are not supported: pass a model folder with model_name_or_path."
    ),
    "reward_model_path": (
        "Raw weight files are not supported: pass a model folder with --reward.model_name_or_path."
    ),
    "vanilla_loss": (
        "KTO has a single loss, which estimates the KL from mismatched pairs in the batch: leave "
        "this flag out."
    ),
    "teacher_peft_model": (
        "Merge the adapter into its base model with openrlhf lora_combiner, and pass the merged "
        "model with --kd.teacher_model."
    ),
    "bos_token": "Special tokens come from the tokenizer in the model's folder.",
    "eos_token": "Special tokens come from the tokenizer in the model's folder.",
    "pad_token": "Special tokens come from the tokenizer in the model's folder.",
    "unk_token": "Special tokens come from the tokenizer in the model's folder.",
}
