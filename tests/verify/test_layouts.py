"""Tests that supervised runs in every layout of ranks are exported, killed and resumed correctly.

The runs average their weights (EMA), so that exports contain the average. Published launch lines
with such layouts pass a dry run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from openrlhf.training.devices import free_port
from tests.e2e.commands import (
    column,
    kill_when,
    launch,
    numbers,
    run,
    small_sft,
    steps_logged,
    write_rows,
)
from tests.e2e.test_sft import task_rows
from tests.goldens.record import launch_lines
from tests.ranks import ROOT
from tests.tiny import HEADS, save_reward_model, save_tiny_model

pytestmark = pytest.mark.verify
STEPS = 12
LORA = {"ds.lora.rank": 4, "ds.lora.alpha": 8}
TP2 = {"ds.tensor_parallel_size": 2}
SP2 = {"ds.ring_attn_size": 2}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    save_tiny_model(folder / "model", "qwen3")
    write_rows(folder / "train.jsonl", task_rows(8 * STEPS, seed=1))
    return folder


def sft_flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        **small_sft(workspace, folder, epochs=1),
        "train.enable_ema": True,
        "train.ema_beta": 0.5,
        "adam.eps": 1e-2,  # a large ε limits how much AdamW amplifies rounding errors
        "ds.packing_samples": True,
        "ckpt.save_steps": 3,
        "ckpt.max_num": 9,
        **changes,
    }


def launcher(ranks: int) -> tuple[str, ...]:
    return ("torchrun", "--nproc_per_node", str(ranks), "--master_port", str(free_port()), "-m")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    [file] = (folder / "model").glob("*.safetensors")
    return load_file(file)


def check_close(folder: Path, whole: Path) -> None:
    """Check that two runs logged the same numbers and exported the same weights up to rounding."""
    for name in ("train/gpt_loss", "train/lr"):
        found = column(folder, name)
        assert len(found) == STEPS and found == pytest.approx(column(whole, name), abs=1e-5), name
    ours, theirs = exported(folder), exported(whole)
    assert set(ours) == set(theirs)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-4, rtol=0, msg=name)


def keep_only(folder: Path, step: int) -> None:
    """Delete the checkpoints of other steps, and the export."""
    for path in (folder / "checkpoints").glob("global_step*.manifest.json"):
        if path.name != f"global_step{step}.manifest.json":
            path.unlink()
    shutil.rmtree(folder / "model")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {**TP2, "ds.zero_stage": 1}),
        (2, {**TP2, "ds.zero_stage": 3}),
        (2, {**TP2, "ds.zero_stage": 2, **LORA}),
        (2, {**SP2, "ds.zero_stage": 2, **LORA}),
        (2, {**SP2, "ds.zero_stage": 3}),
        (4, {**TP2, **SP2, "ds.zero_stage": 2}),
        (4, {**TP2, **SP2, "ds.zero_stage": 3, **LORA}),
        (4, {**TP2, "ds.zero_stage": 1}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_killed_run_resumes_exactly_and_its_export_equals_that_of_one_process(
    workspace: Path, tmp_path: Path, ranks: int, layout: dict[str, Any]
) -> None:
    lora = {name: value for name, value in layout.items() if "lora" in name}
    one, whole, killed = (tmp_path / name for name in ("one", "whole", "killed"))
    run("train_sft", sft_flags(workspace, one, **lora))
    run("train_sft", sft_flags(workspace, whole, **layout), launcher=launcher(ranks))
    check_close(whole, one)

    flags = sft_flags(workspace, killed, **layout)
    process = launch("train_sft", flags, launcher(ranks))
    kill_when(process, lambda: steps_logged(killed) >= 5)
    process.communicate(timeout=60)  # the ranks have the pipes open until they end
    flags |= {"ckpt.load_enable": True}
    run("train_sft", flags, launcher=launcher(ranks))
    assert numbers(killed) == numbers(whole)
    found, expected = exported(killed), exported(whole)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name

    # One process continues from a checkpoint that several processes wrote.
    keep_only(killed, step=6)
    stage = {"ds.zero_stage": layout["ds.zero_stage"]}
    flags = sft_flags(workspace, killed, **lora, **stage) | {"ckpt.load_enable": True}
    refused = run("train_sft", flags, status=2)
    assert "--ds.use_universal_ckpt" in refused.errors
    run("train_sft", flags | {"ds.use_universal_ckpt": True})
    check_close(killed, one)


# ---- published launch lines


def shared_lines() -> list[str]:
    """Return the recorded launch lines whose ranks share sequences or layers."""
    flags = ("ring_attn_size", "ds_tensor_parallel_size", "ds.tensor_parallel_size")
    return [line for line in launch_lines() if any(flag in line for flag in flags)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the models and data that the launch lines name."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "models").mkdir()
    (folder / "data").mkdir()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    sizes: dict[str, Any] = {**HEADS, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17}
    for name in ("base", "sft"):
        save_tiny_model(folder / "models" / name, "llama", chat_template=template, **sizes)
    reward_model = save_reward_model(folder / "models/rm", folder / "models/sft")
    config = AutoConfig.from_pretrained(reward_model)
    config.update({"mean": 0.5, "std": 2.0})  # for --reward.normalize_enable
    config.save_pretrained(reward_model)
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    other = [turns[0], {"role": "assistant", "content": "ab"}]
    rows = {
        "sft": {"question": "ab", "response": "ba"},
        "pairs": {"chosen": turns, "rejected": other},
        "prompts": {"context_messages": turns[:1], "prompt": turns[:1], "label": "ba"},
    }
    for name, row in rows.items():
        write_rows(folder / "data" / f"{name}.jsonl", [row] * 1024)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.parametrize("line", shared_lines())
def test_published_launch_line_with_shared_ranks_passes_a_dry_run(
    published: Path, line: str
) -> None:
    command, *arguments = shlex.split(re.sub(r"\b(data/\w+)", r"\1.jsonl", line))
    flags = ["--dry_run", "--placement.cluster", "2x8"] if "ppo" in command else ["--dry_run"]
    done = subprocess.run(
        [sys.executable, "-m", f"openrlhf.cli.{command}", *arguments, *flags],
        cwd=published,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
