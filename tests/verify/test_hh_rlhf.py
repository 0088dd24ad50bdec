"""Tests for training a reward model on all HH-RLHF pairs, with a kill and a resume halfway.

With the resulting reward model, PPO then trains on the prompts of all pairs.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from tests.e2e.commands import (
    column,
    kill_when,
    launch,
    numbers,
    run,
    samples,
    steps_logged,
    write_rows,
)
from tests.e2e.processes import Process, descendants, survivors
from tests.tiny import tiny_config
from tests.verify.results import write_result

pytestmark = pytest.mark.verify
TWO_PROCESSES = ("deepspeed", "--num_gpus", "2", "--module")
ANSWER = "\n\nAssistant:"
LONGEST = 2048  # maximum length in tokens
VOCABULARY = 2048


def make_model(folder: Path, texts: list[str], marks: Sequence[str] = ()) -> Path:
    """Save a random model with 0.3 million parameters, and train a tokenizer on the texts.

    `marks` are strings that become single tokens.
    """
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>", *marks]
    )
    trained.save_model(str(folder.parent))
    files = (
        json.loads((folder.parent / "vocab.json").read_text()),
        (folder.parent / "merges.txt").read_text(),
    )
    merges = [tuple(line.split()) for line in files[1].splitlines()[1:]]
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "extra_special_tokens": list(marks)}
    Qwen2Tokenizer(vocab=files[0], merges=merges, unk_token=None, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
    }
    config = tiny_config("qwen2-tied", **sizes, intermediate_size=256, vocab_size=VOCABULARY)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def rm_flags(model: Path, pairs: Path, out: Path) -> dict[str, Any]:
    return {
        "model.model_name_or_path": model,
        "data.dataset": pairs,
        "data.max_len": LONGEST,
        "train.batch_size": 64,
        "train.micro_batch_size": 8,
        "train.max_epochs": 1,
        "adam.lr": 1e-3,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "ckpt.save_steps": 5,
        "run.dir": out / "run",
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "ckpt",
    }


@pytest.mark.timeout(3600)
def test_all_pairs_train_a_reward_model_and_all_prompts_train_a_policy_with_it(
    data_dir: Path, tmp_path: Path
) -> None:
    pairs, start = data_dir / "hh-rlhf" / "harmless-base-test.jsonl.gz", time.monotonic()
    with gzip.open(pairs, "rt") as lines:
        chosen = [json.loads(line)["chosen"] for line in lines]
    model = make_model(tmp_path / "model", chosen)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = run("train_rm", rm_flags(model, pairs, whole), launcher=TWO_PROCESSES, timeout=1200)
    kept = next(
        line for line in done.errors.splitlines() + done.printed.splitlines() if "pairs" in line
    )
    total = steps_logged(whole / "run")
    process = launch("train_rm", rm_flags(model, pairs, broken), TWO_PROCESSES)
    started: list[Process] = []

    def half_done() -> bool:
        started[:] = descendants(process.pid)
        return steps_logged(broken / "run") >= total // 2

    kill_when(process, half_done)
    for child in filter(lambda each: each.running, started):
        os.kill(child.pid, signal.SIGKILL)
    assert survivors(started, within=30) == []
    resumed = rm_flags(model, pairs, broken) | {"run.dir": None, "ckpt.load_enable": True}
    run("train_rm", resumed, launcher=TWO_PROCESSES, timeout=1200)
    assert numbers(broken / "run") == numbers(whole / "run")
    accuracy, loss = column(whole / "run", "eval/acc_mean")[-1], column(whole / "run", "train/loss")
    rm_seconds = time.monotonic() - start

    prompts = [{"input": text[: text.rindex(ANSWER) + len(ANSWER)]} for text in chosen]
    dataset, out = write_rows(tmp_path / "prompts.jsonl", prompts), tmp_path / "ppo"
    ppo = {
        "actor.model_name_or_path": model,
        "reward.model_name_or_path": broken / "model",
        "reward.normalize_enable": True,
        "data.prompt_dataset": dataset,
        "data.max_len": LONGEST,
        "rollout.max_new_tokens": 16,
        "rollout.batch_size": 256,
        "rollout.micro_batch_size": 16,
        "train.batch_size": 256,
        "train.micro_batch_size": 16,
        "algo.advantage.estimator": "gae",
        "algo.kl.init_coef": 0.01,
        "train.colocate_actor_ref": True,
        "train.colocate_critic_reward": True,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "run.dir": out / "run",
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "ckpt",
    }
    start = time.monotonic()
    run("train_ppo_ray", ppo, timeout=2400)
    steps = [row for row in numbers(out / "run") if "rollout/num_samples" in row]
    assert sum(row["rollout/num_samples"] for row in steps) == len(prompts)
    assert all(row["train/failed_episodes"] == 0 for row in steps)
    gap = max(row["train/logprob_gap_mean"] for row in steps)
    assert gap < 1e-5
    assert all(row["reward"] is not None for row in samples(out / "run"))
    write_result(
        "hh_rlhf",
        "HH-RLHF: reward model, then PPO with it",
        "make verify",
        ["command", "rows", "steps", "seconds", "seen"],
        [
            [
                "train_rm, 2 processes, packed",
                kept,
                total,
                f"{rm_seconds:.0f} (two runs)",
                "killed and resumed: same numbers",
            ],
            [
                "",
                "",
                "",
                "",
                (
                    f"loss {loss[0]:.3f} → {loss[-1]:.3f}, accuracy {accuracy:.3f} on the first "
                    "training rows"
                ),
            ],
            [
                "train_ppo_ray",
                len(prompts),
                len(steps),
                f"{time.monotonic() - start:.0f}",
                f"mean log-prob gap ≤ {gap:.1e}",
            ],
        ],
        "The model is random and has 0.3 million parameters: it cannot learn what is harmless.",
    )
