"""GRPO in TRL, with vLLM in the same process and a row written after each step.

python -m benchmarks.trl_grpo ROWS MODEL PROMPTS DTYPE MAX_NEW_TOKENS STEPS
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip

import torch
import vllm
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.generation import vllm_generation  # type: ignore[import-not-found]

from benchmarks.reward import reward_of
from benchmarks.trl_offline import Rows
from benchmarks.workload import LONGEST_PROMPT, MICRO_BATCH, SAMPLES, STEP_PROMPTS


def reward(completions: list[str], **_: Any) -> list[float]:
    return [reward_of(text) for text in completions]


def main(rows: str, model: str, prompts: str, dtype: str, new_tokens: str, steps: str) -> None:
    torch.set_num_threads(1)
    name: Any = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    vllm_generation.LLM = partial(
        vllm.LLM, dtype=name
    )  # even for models stored in float32, TRL defaults to bfloat16
    config = GRPOConfig(
        output_dir=f"{rows}.out",
        use_cpu=True,
        bf16=dtype == "bf16",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_importance_sampling_correction=False,
        vllm_max_model_length=LONGEST_PROMPT[Path(prompts).stem] + int(new_tokens),
        beta=0.0,
        num_generations=SAMPLES,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=STEP_PROMPTS * SAMPLES // MICRO_BATCH,
        max_completion_length=int(new_tokens),
        learning_rate=1e-6,
        max_steps=int(steps),
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = load_dataset("json", data_files=prompts, split="train").rename_column("input", "prompt")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Rows(Path(rows))],
    )
    # On a CPU, vLLM cannot load weights a second time, as TRL's weight sync requires.
    # TRL's steps are therefore measured without a weight sync.
    trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
