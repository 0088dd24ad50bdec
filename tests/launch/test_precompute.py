"""Tests for --ref.precompute: runs with the same rows and reference share a file of scores."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from openrlhf.config.options import parse_config
from openrlhf.config.supervised import DPOConfig
from openrlhf.launch import precompute
from openrlhf.trainers.preference import PreferenceTask
from tests.tiny import character_tokenizer, save_tiny_model

ROWS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(200)]
ENGINE: Any = SimpleNamespace(strategy=SimpleNamespace(is_main=True, broadcast=lambda value: value))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


class Runs:
    """DPO runs that store their scores in the same folder."""

    def __init__(self, folder: Path, model: str) -> None:
        self.line = (
            f"--model.model_name_or_path {model} --data.dataset {model} --ckpt.path {folder}"
        )
        self.line += " --data.prompt_key prompt --ds.attn_implementation eager"
        self.scored = 0

    def scores(self, line: str = "", rows: list[dict[str, str]] = ROWS) -> bool:
        """Return whether a run with these additional flags computes its own scores."""
        task: Any = PreferenceTask(
            parse_config(DPOConfig, f"{self.line} {line}".split(), command="dpo")
        )
        before = self.scored
        kept = precompute.with_reference(
            task, task.rows(Dataset.from_list(rows), character_tokenizer()), ENGINE
        )
        assert kept[3].reference == [3.0, -3.0] and len(kept) == len(rows)
        return self.scored > before

    def sums(self, task: Any, rows: Any, engine: Any) -> list[list[float]]:
        self.scored += 1
        return [[float(row), -float(row)] for row in range(len(rows))]


@pytest.fixture
def runs(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Return a set of runs, the first of which has stored its scores."""
    runs = Runs(tmp_path / "checkpoints", model)
    monkeypatch.setattr(precompute, "reference_sums", runs.sums)
    assert runs.scores()
    return runs


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--model.beta 0.5 --model.loss_type ipo --adam.lr 1e-3",
        "--train.seed 7",
        "--ds.zero_stage 3",
    ],
)
def test_stored_scores_are_reused_with_a_different_objective(line: str, runs: Runs) -> None:
    assert not runs.scores(line)


def test_different_reference_or_precision_recomputes_scores(runs: Runs, other: str) -> None:
    lora = "--ds.lora.rank 2"
    assert not runs.scores(lora)  # the reference is the policy without its adapter
    for line in (
        f"--ref.model_name_or_path {other}",
        "--ds.param_dtype fp32",
        "--ds.attn_implementation sdpa",
        f"{lora} --ds.load_in_4bit",
    ):
        assert runs.scores(line)
        assert not runs.scores(line)


@pytest.mark.parametrize("place", [0, 1, 100, 199])
def test_changing_any_row_recomputes_scores(place: int, runs: Runs) -> None:
    changed = [*ROWS[:place], ROWS[place] | {"rejected": "x"}, *ROWS[place + 1 :]]
    assert runs.scores(rows=changed)
    assert not runs.scores(rows=changed)


def test_scores_that_cannot_be_stored_are_computed_again_by_the_next_run(
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write(path: Path, contents: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(precompute, "write_atomically", write)
        assert runs.scores(rows=ROWS[:100])
    assert str(tmp_path / "checkpoints" / "reference-") in capsys.readouterr().err
    assert runs.scores(rows=ROWS[:100])
    assert not runs.scores(rows=ROWS[:100])
