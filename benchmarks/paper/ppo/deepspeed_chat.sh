#!/usr/bin/env bash
# PPO in DeepSpeed-Chat with the settings of ours.yaml. Prints a line after each round of 1,024 prompts.
#     deepspeed_chat.sh ENVIRONMENT MODEL REWARD_MODEL DATA OUTPUT GPUS
# ENVIRONMENT was made by install.sh, REWARD_MODEL by models.py, and DATA has train.json and eval.json.
# HYBRID=0 turns DeepSpeed's hybrid engine off.
set -euo pipefail
environment=$(realpath "${1:?}") model=${2:?} reward=$(realpath "${3:?}")
data=$(realpath "${4:?}") output=${5:?} gpus=${6:?}
mkdir -p "$output"
output=$(realpath "$output")
chat=$environment/source/applications/DeepSpeed-Chat
mkdir -p "$chat/data"
cp "$data/train.json" "$data/eval.json" "$chat/data/"
export PATH=$environment/bin:$PATH PYTHONUNBUFFERED=1

per_device=16
batches=$((1024 / (per_device * gpus)))      # generation batches before an update: 1,024 prompts
accumulation=$((128 / (per_device * gpus)))  # 128 samples per optimizer step
hybrid=(--enable_hybrid_engine)
if [ "${HYBRID:-1}" = 0 ]; then hybrid=(); fi

cd "$chat/training/step3_rlhf_finetuning"
exec deepspeed --num_gpus "$gpus" --master_port 12346 main.py \
  --data_path local/jsonfile \
  --data_split 0,0,1 \
  --data_output_path "$output/data" \
  --actor_model_name_or_path "$model" \
  --critic_model_name_or_path "$reward" \
  --num_padding_at_beginning 0 \
  --per_device_generation_batch_size "$per_device" \
  --per_device_training_batch_size "$per_device" \
  --generation_batches "$batches" \
  --ppo_epochs 1 \
  --max_prompt_seq_len 256 \
  --max_answer_seq_len 256 \
  --actor_learning_rate 9.65e-6 \
  --critic_learning_rate 5e-6 \
  --actor_weight_decay 0.1 \
  --critic_weight_decay 0.1 \
  --num_train_epochs 1 \
  --lr_scheduler_type cosine \
  --gradient_accumulation_steps "$accumulation" \
  --num_warmup_steps 0 \
  --actor_gradient_checkpointing \
  --critic_gradient_checkpointing \
  --actor_dropout 0.0 \
  --critic_dropout 0.0 \
  --dtype bf16 \
  --actor_zero_stage 3 \
  --critic_zero_stage 3 \
  --deepspeed \
  --seed 1234 \
  "${hybrid[@]}"
