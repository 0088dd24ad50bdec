#!/usr/bin/env bash
# DAPO in verl with the settings of ours.yaml. Prints verl's metrics after each step.
#     verl.sh ENVIRONMENT MODEL PROMPTS.parquet OUTPUT GPUS STEPS LENGTH PROMPTS_PER_STEP
set -euo pipefail
environment=$(realpath "${1:?}") model=${2:?} prompts=$(realpath "${3:?}") output=${4:?}
gpus=${5:?} steps=${6:?} length=${7:?} batch=${8:?}
grading=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../grading.py")
export PATH=$environment/bin:$PATH PYTHONUNBUFFERED=1

exec "$environment/bin/python" -m verl.trainer.main_ppo \
  data.train_files="$prompts" \
  data.val_files="$prompts" \
  data.val_max_samples=8 \
  data.prompt_key=prompt \
  data.max_prompt_length=1024 \
  data.max_response_length="$length" \
  data.train_batch_size="$batch" \
  data.seed=42 \
  algorithm.adv_estimator=grpo \
  algorithm.filter_groups.enable=True \
  algorithm.filter_groups.metric=acc \
  algorithm.use_kl_in_reward=False \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.clip_ratio_c=10.0 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.actor.use_dynamic_bsz=False \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 \
  actor_rollout_ref.actor.grad_clip=1.0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
  reward.custom_reward_function.path="$grading" \
  reward.custom_reward_function.name=compute_score \
  reward.reward_manager.name=dapo \
  +reward.reward_kwargs.overlong_buffer_cfg.enable=True \
  +reward.reward_kwargs.overlong_buffer_cfg.len=$((length / 4)) \
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  +reward.reward_kwargs.overlong_buffer_cfg.log=False \
  +reward.reward_kwargs.max_resp_len="$length" \
  trainer.logger='["console"]' \
  trainer.project_name=paper \
  trainer.experiment_name=dapo \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node="$gpus" \
  trainer.val_before_train=False \
  trainer.test_freq=-1 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.default_local_dir="$output" \
  trainer.total_training_steps="$steps"
