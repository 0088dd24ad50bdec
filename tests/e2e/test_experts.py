"""End-to-end tests of mixture-of-experts training with the load-balancing loss."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from openrlhf.training.devices import free_port
from tests.e2e.commands import column, run, write_rows
from tests.e2e.test_sft import sft_flags, task_rows
from tests.tiny import save_tiny_model

KINDS = {
    "mixtral": (2, None),
    "qwen3-moe": (3, True),
}  # maps a model to its ZeRO stage and to whether rows are packed


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    for kind in KINDS:
        save_tiny_model(own_folder / kind, kind)
    save_tiny_model(own_folder / "dense")
    write_rows(own_folder / "train.jsonl", task_rows(52, seed=1))
    return own_folder


def flags(workspace: Path, folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    common = {
        "model.model_name_or_path": workspace / model,
        "eval.dataset": None,
        "ckpt.save_steps": -1,
    }
    return sft_flags(workspace, folder, **common, **changes)


@pytest.mark.verify
@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_training_in_two_processes_learns_the_task_with_balanced_experts(
    workspace: Path, kind: str
) -> None:
    """If all experts are used equally, the balancing loss is 2, the number of experts per token.

    Training without the balancing loss leads to a larger value.
    """
    stage, packing = KINDS[kind]
    ends = {}
    for coef in (1.0, 1e-9):
        folder = workspace / f"{kind}-{coef}"
        changes = {
            "model.aux_loss_coef": coef,
            "ds.zero_stage": stage,
            "ds.packing_samples": packing,
        }
        launcher = ("torchrun", "--master_port", str(free_port()), "--nproc_per_node", "2", "-m")
        run("train_sft", flags(workspace, folder, kind, **changes), launcher=launcher)
        balance, losses = column(folder, "train/aux_loss"), column(folder, "train/gpt_loss")
        assert all(map(math.isfinite, [*balance, *losses]))
        assert losses[-1] < losses[0] - 1
        ends[coef] = fmean(balance[-6:])
    assert ends[1.0] < 3 and ends[1e-9] > ends[1.0] + 0.5
    exported = AutoModelForCausalLM.from_pretrained(workspace / f"{kind}-1.0" / "model")
    assert exported.config.model_type == kind.replace("-", "_")


def test_without_a_coefficient_no_balancing_loss_is_added_or_logged(workspace: Path) -> None:
    folder = workspace / "plain"
    run("train_sft", flags(workspace, folder, "mixtral", **{"train.max_epochs": 1}))
    assert column(folder, "train/aux_loss") == []


def test_error_for_a_model_without_experts_names_the_flag_and_the_model(workspace: Path) -> None:
    done = run(
        "train_sft",
        flags(workspace, workspace / "refused", "dense", **{"model.aux_loss_coef": 0.1}),
        status=2,
    )
    assert "--model.aux_loss_coef" in done.errors and "dense (qwen2) has no experts" in done.errors
    assert "Traceback" not in done.errors
