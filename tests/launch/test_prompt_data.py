"""The prompts that an RL run reads before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.prompt_data import load_prompts
from tests.e2e.commands import as_arguments
from tests.tiny import save_tiny_model


def test_the_limit_of_training_prompts_does_not_cut_the_evaluation_set(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": f"{n}+1="}) + "\n" for n in range(9)))
    flags = {
        "actor.model_name_or_path": save_tiny_model(tmp_path / "model"),
        "data.prompt_dataset": str(rows),
        "data.max_samples": 4,
        "data.max_len": 32,
        "reward.remote_url": "http://localhost:1/get_reward",
        "eval.dataset": str(rows),
        "ckpt.path": str(tmp_path / "ckpt"),
    }
    read = load_prompts(parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray"))
    assert read.eval is not None
    assert (len(read.train), len(read.eval)) == (4, 9)
