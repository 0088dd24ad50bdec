"""End-to-end tests of training with adapters.

GRPO publishes merged weights or only the adapter. A preference run is killed and resumed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from openrlhf.observability.run_folder import read_lines
from tests.e2e.commands import (
    column,
    kill_when,
    launch,
    numbers,
    places,
    run,
    small_grpo,
    steps_logged,
    write_rows,
)
from tests.tiny import HEADS, save_tiny_model

REWARDS = Path(__file__).parent / "reward_files"


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create the module's model, prompts and preference pairs."""
    save_tiny_model(own_folder / "model", "qwen2-untied", max_position_embeddings=1024, **HEADS)
    draw = random.Random(1)
    words = ["".join(draw.choices("bcdefgh", k=4)) + "=" for _ in range(24)]
    write_rows(own_folder / "prompts.jsonl", [{"input": word} for word in words])
    pairs = [
        {"prompt": word, "chosen": "ab" * draw.randint(1, 4), "rejected": "cd"}
        for word in words * 4
    ]
    write_rows(own_folder / "pairs.jsonl", pairs)
    return own_folder


def grpo(workspace: Path, folder: Path, **changes: Any) -> None:
    run(
        "train_ppo_ray",
        {
            **small_grpo(workspace, folder, prompts=4, samples=4),
            "reward.remote_url": REWARDS / "letters.py",
            "actor.adam.lr": 1e-2,
            "actor.lr_scheduler": "constant",
            "algo.kl.use_loss": True,
            "algo.kl.estimator": "k3",
            "ds.lora.rank": 8,
            "ds.lora.alpha": 32,
            **changes,
        },
    )


def check_numbers(folder: Path, *, gap: float) -> None:
    """Check that the policy moved away from its reference in six steps.

    Also checks that in each step, the engines sampled with the policy's weights.
    """
    kl = column(folder, "train/kl")
    assert len(kl) == 6 and kl[0] == 0 and min(kl[1:]) > 1e-4
    assert max(column(folder, "train/logprob_gap_mean")) < gap


@pytest.mark.parametrize("published", [pytest.param("merged", marks=pytest.mark.verify), "adapter"])
def test_engines_sample_from_the_policy_and_the_reference_has_no_adapters(
    workspace: Path, tmp_path: Path, published: str
) -> None:
    grpo(workspace, tmp_path, **{"ds.zero_stage": 0, "ds.lora.publish": published})
    check_numbers(tmp_path, gap=1e-5)
    assert "ref" not in {path.name.partition("-")[0] for path in (tmp_path / "logs").iterdir()}
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(workspace / "model")
    tokens = torch.tensor([[5, 9, 33, 17]])
    with torch.no_grad():
        assert (adapted(tokens).logits - base(tokens).logits).abs().max() > 0.01


@pytest.mark.verify
@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        ({"ds.zero_stage": 3, "actor.num_gpus_per_node": 2}, 1e-5),
        (
            {
                "ds.lora.dora": True,
                "ds.zero_stage": 2,
                "train.async_enable": True,
                "train.max_restarts": 1,
            },
            2.0,
        ),
        ({"ds.load_in_4bit": True, "ds.param_dtype": "bf16"}, 0.01),
        (
            {
                "ds.lora.publish": "adapter",
                "ds.zero_stage": 3,
                "actor.num_gpus_per_node": 2,
                "vllm.num_engines": 2,
            },
            1e-5,
        ),
        ({"ds.lora.publish": "adapter", "ds.lora.rslora": True, "train.async_enable": True}, 2.0),
        ({"ds.lora.publish": "adapter", "ds.param_dtype": "bf16", "vllm.dtype": "bf16"}, 0.02),
        (
            {
                "ds.param_dtype": "bf16",
                "algo.advantage.estimator": "gae",
                "train.colocate_all": True,
            },
            0.01,
        ),
    ],
    ids=[
        "zero 3",
        "dora, asynchronous",
        "4 bits",
        "adapter, zero 3",
        "adapter, asynchronous",
        "adapter, bf16",
        "hybrid with a critic",
    ],
)
def test_engine_and_trainer_logprobs_agree_in_other_layouts(
    workspace: Path, tmp_path: Path, changes: dict[str, Any], gap: float
) -> None:
    grpo(workspace, tmp_path, **changes)
    check_numbers(tmp_path, gap=gap)


@pytest.mark.verify
@pytest.mark.parametrize(
    "more", [{}, {"ref.precompute": True}, {"ds.zero_stage": 3, "ds.lora.dropout": 0.1}], ids=str
)
def test_resumed_preference_run_logs_the_same_metrics_as_an_uninterrupted_run(
    workspace: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    flags = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "pairs.jsonl",
        "data.prompt_key": "prompt",
        "data.max_len": 32,
        "train.batch_size": 8,
        "adam.lr": 1e-2,
        "ds.param_dtype": "fp32",
        "ds.lora.rank": 4,
        "ckpt.save_steps": 4,
        **more,
    }
    run("train_dpo", flags | places(tmp_path / "whole"))
    process = launch("train_dpo", flags | places(tmp_path / "killed"))
    kill_when(process, lambda: steps_logged(tmp_path / "killed") >= 6)
    run(
        "train_dpo",
        flags | places(tmp_path / "killed") | {"ckpt.load_enable": True, "run.dir": None},
    )
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    first = next(iter(read_lines(tmp_path / "whole" / "metrics.jsonl")))
    assert first["train/chosen_reward"] == first["train/reject_reward"] == 0
    ours, theirs = (
        tmp_path / run / "model" / "adapter_model.safetensors" for run in ("killed", "whole")
    )
    assert ours.read_bytes() == theirs.read_bytes()
