"""Tests that a run without learning progress prints a notice and lists it in its report."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from openrlhf.observability.health import MEANING
from tests.e2e.commands import places, run, write_rows
from tests.e2e.test_grpo import PROMPTS, grpo_flags, words
from tests.e2e.test_sft import task_rows
from tests.tiny import HEADS, save_tiny_model

ALWAYS_WRONG = (
    "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0 for _ in queries]}\n"
)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_tiny_model(tmp_path / "model", **HEADS)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def notices(printed: str, report: Path) -> list[str]:
    """Check that the report lists each notice once, and return the notices on the terminal."""
    found = [
        line.removeprefix("[notice] ")
        for line in printed.splitlines()
        if line.startswith("[notice] ")
    ]
    page = html.unescape(report.read_text())
    assert [page.count(notice) for notice in found] == [1] * len(found)
    return found


def test_learning_rate_of_zero_prints_a_notice(workspace: Path) -> None:
    folder = workspace / "run"
    flags = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": write_rows(workspace / "train.jsonl", task_rows(28, seed=1)),
        "data.input_key": "input",
        "data.output_key": "output",
        "train.batch_size": 4,
        "train.micro_batch_size": 4,
        "adam.lr": 0,
        "ds.param_dtype": "fp32",
        **places(folder),
    }
    done = run("train_sft", flags)
    assert notices(done.printed, folder / "report.html") == [
        f"Steps 1 to 5: train/lr is 0. {MEANING['no update']}"
    ]


@pytest.mark.verify
def test_rewards_that_never_differ_print_a_notice(workspace: Path) -> None:
    folder = workspace / "run"
    write_rows(workspace / "prompts.jsonl", words(PROMPTS, seed=1))
    (workspace / "wrong.py").write_text(ALWAYS_WRONG)
    done = run(
        "train_ppo_ray",
        grpo_flags(workspace, folder, **{"reward.remote_url": workspace / "wrong.py"}),
    )
    about = [
        notice for notice in notices(done.printed, folder / "report.html") if "rewards" in notice
    ]
    assert about == [f"Steps 1 to 5: train/dead_groups is 1. {MEANING['same rewards']}"]
