"""GRPO on GSM8K in TRL with the settings of ours.yaml. Prints a line after each step.

Runs in the environment of install.sh:

    python -m benchmarks.paper.gsm8k.trl_grpo --model MODEL --prompts FILE --steps 13 --gpus 1

With several GPUs, start the script with `accelerate launch --module` and one process per GPU.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.paper.grading import trl_reward

PROMPTS, SAMPLES, MICRO_BATCH, PROMPT_TOKENS, NEW_TOKENS = 128, 8, 8, 512, 512


class Marks(TrainerCallback):
    """A callback that prints each step's logged metrics on one line."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "completions/mean_length" in logs:
            mark = {
                "step": state.global_step,
                "response_length": logs["completions/mean_length"],
                "reward": logs["reward"],
            }
            print("paper " + json.dumps(mark), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    chosen = parser.parse_args()
    config = GRPOConfig(
        output_dir=chosen.output,
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=True,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * SAMPLES // (MICRO_BATCH * chosen.gpus),
        gradient_checkpointing=False,
        max_steps=chosen.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over all tokens in the step, as in this project
        scale_rewards="group",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.5,
        vllm_max_model_length=PROMPT_TOKENS + NEW_TOKENS,
        vllm_tensor_parallel_size=1,
        vllm_enable_sleep_mode=True,
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=42,
    )
    GRPOTrainer(
        model=chosen.model,
        reward_funcs=trl_reward,
        args=config,
        train_dataset=load_dataset("json", data_files=chosen.prompts, split="train"),
        callbacks=[Marks()],
    ).train()


if __name__ == "__main__":
    main()
