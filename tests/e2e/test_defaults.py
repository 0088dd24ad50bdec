"""Tests that each command runs with only its required flags and logs plausible values.

Precision, schedules, batch sizes and algorithms have their default values. All other flags set
output paths, or make a run small enough for a CPU with a tiny model, few rows and short responses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.start import run_ppo
from openrlhf.observability.glossary import find_spec
from tests.e2e.commands import (
    as_arguments,
    column,
    default_schedule,
    evaluated,
    numbers,
    places,
    run,
    write_rows,
)
from tests.e2e.servers import reward_model_server
from tests.e2e.test_grpo import REWARDS, words
from tests.pages import flag_sets
from tests.tiny import HEADS, save_tiny_model
from tests.verify.test_learning import RUNS as LEARNING_RUNS

MODEL: dict[str, Any] = {
    **HEADS,
    "max_position_embeddings": 2048,
}  # the default --data.max_len
VOCABULARY = 64
ROWS, BATCH = (
    320,
    128,
)  # two full optimizer steps and one with the remaining 64 rows
# `make test` runs only a few methods.
# `make verify` runs all other methods, here with defaults or for longer in
# tests/verify/test_learning.py.
SOME_METHODS = ("gae", "dapo")
OTHER_METHODS = sorted(flag_sets().keys() - SOME_METHODS - LEARNING_RUNS.keys())


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create models and datasets for all commands."""
    save_tiny_model(own_folder / "model", **MODEL)
    save_tiny_model(own_folder / "teacher", **MODEL, seed=5)
    rows = words(ROWS, seed=1)
    write_rows(own_folder / "rows.jsonl", [{**row, "output": row["input"][::-1]} for row in rows])
    write_rows(
        own_folder / "pairs.jsonl",
        [{"chosen": f"{row['input']}aaa", "rejected": row["input"]} for row in rows],
    )
    write_rows(own_folder / "text.jsonl", [{"input": "abc" * (1 + row % 3)} for row in range(10)])
    return own_folder


def all_plausible(folder: Path) -> None:
    """Check that every metric that a run logged is documented and has a plausible value."""
    rows = numbers(folder)
    assert rows
    undeclared = {name for row in rows for name in row if name != "step" and not find_spec(name)}
    assert undeclared <= {"train/digits"}


# ---- training


@pytest.fixture(scope="module")
def sft(workspace: Path) -> Path:
    folder = workspace / "sft"
    required = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "rows.jsonl",
        "data.output_key": "output",
    }
    run("train_sft", required | places(folder))
    return folder


def test_sft_trains_with_default_flags(sft: Path) -> None:
    all_plausible(sft)
    assert column(sft, "train/lr") == default_schedule(5e-6, 2 * (ROWS // BATCH))
    assert column(sft, "train/gpt_loss") == pytest.approx(
        [math.log(VOCABULARY)] * 4, abs=0.15
    )  # the model is almost untrained


@pytest.fixture(scope="module")
def reward_model(workspace: Path) -> Path:
    folder = workspace / "rm"
    required = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "pairs.jsonl",
    }
    run("train_rm", required | places(folder))
    return folder


def test_reward_model_trains_with_default_flags(reward_model: Path) -> None:
    all_plausible(reward_model)
    assert column(reward_model, "train/lr") == default_schedule(9e-6, ROWS // BATCH)
    assert column(reward_model, "train/loss") == pytest.approx(
        [math.log(2)] * 2, abs=0.2
    )  # the model is almost untrained


@pytest.fixture(scope="module")
def ppo(workspace: Path, reward_model: Path) -> Path:
    folder = workspace / "ppo"
    required = {
        "actor.model_name_or_path": workspace / "model",
        "reward.model_name_or_path": reward_model / "model",
        "data.prompt_dataset": workspace / "rows.jsonl",
    }
    run(
        "train_ppo_ray",
        required | places(folder) | {"rollout.batch_size": BATCH, "rollout.max_new_tokens": 8},
    )
    return folder


def test_ppo_with_a_reward_model_trains_with_default_flags(ppo: Path) -> None:
    all_plausible(ppo)
    steps = [row for row in numbers(ppo) if "train/reward" in row]
    assert [row["rollout/num_samples"] for row in steps] == [BATCH, BATCH, ROWS - 2 * BATCH]
    assert column(ppo, "train/actor_lr") == default_schedule(1e-6, len(steps))
    assert column(ppo, "train/critic_lr") == default_schedule(9e-6, len(steps))
    first = steps[0]
    # The policy equals its reference, and the only optimizer step of each batch starts at π_old.
    assert first["train/kl"] == 0
    for row in steps:
        assert abs(row["train/ppo_kl"]) < 1e-6 and row["train/ppo_clip_ratio"] == 0
        assert row["train/logprob_gap_mean"] < 0.02  # both engine and trainer use bfloat16
        assert row["train/rollout_ratio"] == pytest.approx(1, abs=0.02)
        assert row["train/response_length"] <= 8
        assert row["train/return"] == pytest.approx(
            row["train/reward"] - 0.01 * row["train/kl"] * 8, abs=0.02
        )


@pytest.mark.verify
def test_train_ppo_accepts_the_flags_of_older_launch_scripts(
    workspace: Path, reward_model: Path
) -> None:
    """The flags are from an older release's script, with shorter answers and fewer prompts."""
    folder = workspace / "old_ppo"
    line = {
        "pretrain": workspace / "model",
        "reward_pretrain": reward_model / "model",
        "save_path": folder / "model",
        "ckpt_path": folder / "checkpoints",
        **dict.fromkeys(("save_steps", "eval_steps"), -1),
        **{
            "logging_steps": 1,
            "micro_train_batch_size": 2,
            "train_batch_size": 16,
            "micro_rollout_batch_size": 4,
        },
        **{
            "rollout_batch_size": 16,
            "max_epochs": 1,
            "prompt_max_len": 64,
            "generate_max_len": 8,
            "zero_stage": 2,
        },
        **{"actor_learning_rate": 5e-7, "critic_learning_rate": 9e-6, "init_kl_coef": 0.01},
        **{"prompt_data": workspace / "rows.jsonl", "input_key": "input", "max_samples": 32},
        **dict.fromkeys(
            ("bf16", "normalize_reward", "adam_offload", "flash_attn", "gradient_checkpointing"),
            True,
        ),
    }
    done = run("train_ppo", line | {"run.dir": folder})
    assert "--pretrain is now --actor.model_name_or_path; " in done.errors
    all_plausible(folder)
    assert [row["rollout/num_samples"] for row in numbers(folder) if "train/reward" in row] == [
        16,
        16,
    ]
    assert column(folder, "train/critic_lr") == default_schedule(9e-6, 2)
    assert (folder / "model/config.json").is_file()


# ---- methods


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start one Ray cluster for all methods."""
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "name",
    [*SOME_METHODS, *(pytest.param(name, marks=pytest.mark.verify) for name in OTHER_METHODS)],
)
def test_each_method_trains_with_default_values_for_all_other_flags(
    name: str, workspace: Path
) -> None:
    """Run two steps with sequence lengths and group sizes small enough for a CPU."""
    folder, method = workspace / name, flag_sets()[name]
    samples_per_prompt = 4 if "--rollout.n_samples_per_prompt" in method else 1
    flags = {
        "actor.model_name_or_path": workspace / "model",
        "data.prompt_dataset": workspace / "rows.jsonl",
        "data.label_key": "label",
        "data.max_samples": 32 // samples_per_prompt,
        "data.max_len": 24,
        "reward.remote_url": REWARDS / "letters.py",
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": 16 // samples_per_prompt,
        "train.batch_size": 16,
    } | places(folder)
    if name == "distill":  # the only training signal comes from the teacher
        del flags["reward.remote_url"]
    if samples_per_prompt > 1:
        flags["rollout.n_samples_per_prompt"] = samples_per_prompt
    stand_ins = {
        "algo.distill.teacher": workspace / "teacher",
        "algo.ptx.dataset": workspace / "text.jsonl",
        "reward.overlong_buffer_len": 4,
    }
    flags |= {path: value for path, value in stand_ins.items() if f"--{path}" in method}
    run_ppo(parse_config(PPOConfig, [*method, *as_arguments(flags)], command="train_ppo_ray"))
    steps = [row for row in numbers(folder) if "train/policy_loss" in row]
    assert len(steps) == 2
    assert [row["train/nonfinite_steps"] for row in steps] == [0, 0]
    all_plausible(folder)


# ---- serving and evaluation commands


def test_reward_model_is_served_with_default_flags(reward_model: Path) -> None:
    text = "abc=aaa"
    with reward_model_server(reward_model / "model", ds__param_dtype=None) as server:
        answer = httpx.post(server.url, json={"query": [text]}, timeout=120).json()
    tokens = AutoTokenizer.from_pretrained(reward_model / "model")(text, return_tensors="pt")
    hf = AutoModelForSequenceClassification.from_pretrained(
        reward_model / "model", dtype=torch.float32
    )
    with torch.no_grad():
        expected = hf(**tokens).logits[0, 0].item()
    assert answer["rewards"] == pytest.approx([expected], abs=0.02)


def test_eval_runs_with_default_flags(workspace: Path) -> None:
    folder = workspace / "eval"
    write_rows(workspace / "few.jsonl", words(6, seed=2))
    required = {
        "model.model_name_or_path": workspace / "model",
        "eval.dataset": workspace / "few.jsonl",
        "reward.remote_url": REWARDS / "letters.py",
    }
    run("main eval", required | {"run.dir": folder, "rollout.max_new_tokens": 8})
    all_plausible(folder)
    assert column(folder, "eval/eval_num_samples") == [24]
    rewards = [row["reward"] for row in evaluated(folder)]
    assert column(folder, "eval/eval_words_reward_mean") == pytest.approx([sum(rewards) / 24])


def test_reward_test_runs_with_default_flags(workspace: Path) -> None:
    required = {
        "reward.remote_url": REWARDS / "letters.py",
        "data.prompt_dataset": workspace / "rows.jsonl",
        "data.label_key": "label",
    }
    done = run("main reward test", required)
    assert f"{ROWS}" in done.printed
