"""GRPO with the models and the engine on one GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openrlhf.observability.run_folder import read_lines
from tests.e2e.commands import column, run, write_rows
from tests.gpu.place import save_model
from tests.gpu.rehearsal import REHEARSAL
from tests.tiny import character_tokenizer

pytestmark = pytest.mark.gpu
LETTERS = Path(__file__).parent.parent / "e2e/reward_files/letters.py"
STEPS = 2 if REHEARSAL else 20


def test_grpo_runs_with_models_and_engine_on_one_gpu(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    layers = 2 if REHEARSAL else 8
    save_model(
        tmp_path / "model", num_hidden_layers=layers, vocab_size=len(character_tokenizer())
    )  # every token of the vocabulary has text
    torch.cuda.empty_cache()
    draw = random.Random(0)
    prompts = ["".join(draw.choices("bcdefgh", k=6)) + "=" for _ in range(8 * STEPS)]
    write_rows(tmp_path / "prompts.jsonl", [{"input": prompt} for prompt in prompts])
    flags = {
        "actor.model_name_or_path": tmp_path / "model",
        "data.prompt_dataset": tmp_path / "prompts.jsonl",
        "data.max_len": 256,
        "reward.remote_url": LETTERS,
        "rollout.max_new_tokens": 16 if REHEARSAL else 128,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 8,
        "rollout.micro_batch_size": 16,
        "train.batch_size": 64,
        "train.micro_batch_size": 16,
        "actor.num_gpus_per_node": 1,
        "train.colocate_all": True,
        "vllm.enable_sleep": True,
        "vllm.gpu_memory_utilization": 0.4,
        "vllm.enforce_eager": True,
        "ds.enable_sleep": True,
        "ds.packing_samples": True,
        "actor.adam.lr": 1e-5,
        "algo.advantage.estimator": "group_norm",
        "run.dir": tmp_path / "run",
        "ckpt.output_dir": tmp_path / "trained",
        "ckpt.path": tmp_path / "checkpoints",
    }
    run(
        "train_ppo_ray", flags, timeout=220
    )  # less than the check's time limit, so that the run's output is shown
    gaps = column(tmp_path / "run", "train/logprob_gap_mean")
    seconds = [row["timing/step_total"] for row in read_lines(tmp_path / "run/metrics.jsonl")]
    record_property("logprob_gap_mean", round(max(gaps), 4))
    record_property("seconds_per_step", round(sorted(seconds)[len(seconds) // 2], 2))
    assert len(gaps) == STEPS and max(gaps) < 0.05
