"""End-to-end tests of the terms of a policy update.

The tests cover sequence ratios, importance-weight corrections, a teacher, pretraining text, and the
early stopping of runs and updates.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import (
    column,
    kill_when,
    launch,
    numbers,
    places,
    run,
    steps_logged,
    write_rows,
)
from tests.e2e.test_grpo import STEPS, grpo_flags, words
from tests.tiny import HEADS, save_tiny_model


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    save_tiny_model(own_folder / "model", **HEADS)
    save_tiny_model(own_folder / "teacher", seed=5, **HEADS)
    write_rows(own_folder / "prompts.jsonl", words(24, seed=1))
    write_rows(own_folder / "text.jsonl", [{"input": "abc" * (1 + row % 3)} for row in range(10)])
    return own_folder


def everything(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Run GSPO with two optimizer steps per batch and sequence-level corrections.

    The loss also includes terms for a teacher and for pretraining text.
    """
    return grpo_flags(
        workspace,
        folder,
        **{
            "actor.policy_loss_type": "gspo",
            "actor.eps_clip_low_high": [3e-4, 4e-4],
            "train.batch_size": 8,
            "algo.advantage.is_correction_level": "seq",
            "algo.distill.teacher": workspace / "teacher",
            "algo.distill.coef": 0.1,
            "algo.ptx.dataset": workspace / "text.jsonl",
            "algo.ptx.coef": 0.2,
            "ckpt.save_steps": 2,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    folder = workspace / "whole"
    run("train_ppo_ray", everything(workspace, folder))
    return folder


def test_all_loss_terms_are_trained_on_and_logged(whole: Path) -> None:
    text = column(whole, "train/ptx_loss")
    assert len(text) == STEPS and text[-1] < text[0] - 0.2
    assert all(map(math.isfinite, column(whole, "train/teacher_kl")))
    assert column(whole, "train/actor_steps") == [2.0] * STEPS
    assert (
        max(column(whole, "train/ppo_clip_ratio")) > 0
    )  # each batch's second optimizer step is off-policy
    assert (
        column(whole, "train/rollout_ratio_outside") == [0.0] * STEPS
    )  # on a CPU, engine and trainer compute the same log-probabilities
    assert all(abs(ratio - 1) < 1e-4 for ratio in column(whole, "train/rollout_ratio"))


@pytest.mark.verify
def test_killed_run_resumes_with_the_same_metrics_and_pretraining_text(
    whole: Path, workspace: Path
) -> None:
    folder = workspace / "killed"
    flags = {"config": whole / "config.yaml", **places(folder)}
    kill_when(launch("train_ppo_ray", flags), lambda: steps_logged(folder) >= 3)
    run("train_ppo_ray", {**flags, "run.dir": None, "ckpt.load_enable": True})
    assert numbers(folder) == numbers(whole)


@pytest.mark.verify
def test_run_stops_at_the_step_whose_kl_exceeds_the_limit(whole: Path, workspace: Path) -> None:
    """The learning rate is so large that the KL keeps growing.

    Up to its last step, the run logs the same metrics as a run without a limit.
    """
    distances = column(whole, "train/kl")
    limit = sorted(distances)[STEPS // 2]
    last = next(step for step, kl in enumerate(distances, 1) if kl > limit)
    folder = workspace / "stopped"
    done = run(
        "train_ppo_ray",
        {"config": whole / "config.yaml", **places(folder), "algo.kl.stop_run": limit},
    )
    assert numbers(folder) == numbers(whole)[:last]
    assert f"The run ends after step {last}" in done.printed + done.errors
    assert (folder / "model" / "model.safetensors").is_file()
    assert (folder / "checkpoints" / "_actor" / f"global_step{last}").is_dir()


@pytest.mark.verify
def test_updates_on_a_batch_stop_once_the_update_kl_exceeds_its_limit(workspace: Path) -> None:
    """The first of four optimizer steps starts at π_old.

    The second optimizer step finds that the policy has moved too far, so no more steps are taken.
    """
    folder = workspace / "moved"
    flags = {"train.max_epochs": 2, "algo.kl.stop_update": 1e-6, "data.max_samples": 8}
    run("train_ppo_ray", everything(workspace, folder, **flags))
    assert column(folder, "train/actor_steps") == [2.0, 2.0]
    assert min(column(folder, "train/update_kl")) > 1e-6
