"""Tests for logging runs, including resumed runs that continue in the same files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf import reporting
from openrlhf.config.options import parse_config
from openrlhf.config.shared import LoggerConfig, RunConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.core.trajectory import Failure
from openrlhf.observability.recorder import SAMPLES_PER_EVALUATION, SAMPLES_PER_STEP, Recorder
from openrlhf.observability.run_folder import read_lines
from openrlhf.trainers.filtering import thrown_away
from tests.trainers.episodes import episode, failed


def recorder(folder: Path, *, resume_step: int | None = None, logging_steps: int = 1) -> Recorder:
    config = SFTConfig(
        logger=LoggerConfig(logging_steps=logging_steps), run=RunConfig(dir=str(folder), quiet=True)
    )
    return Recorder(config, str(folder), resume_step=resume_step)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key != "time"}
        for row in read_lines(folder / name)
    ]


def log_steps(recorder: Recorder, first: int, last: int) -> None:
    """Log samples, step metrics and an evaluation, as the training loops do."""
    for step in range(first, last + 1):
        recorder.samples(step, [episode(step, score=1.0)])
        recorder.step(step, {"train/loss": float(step)})
        recorder.evaluation(step, {"eval/score": float(step)})


def test_resumed_run_removes_rows_logged_after_its_checkpoint(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    log_steps(recorder(whole), 1, 4)
    killed = recorder(cut)
    log_steps(killed, 1, 3)
    killed.samples(4, [episode(99, score=0.0)])  # logged right before the process was killed
    log_steps(recorder(cut, resume_step=2), 3, 4)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows(cut, name) == rows(whole, name)
        assert len(rows(cut, name)) > 3


def resumed_notices(
    folder: Path,
    before: list[str],
    after: list[str],
    capsys: pytest.CaptureFixture[str],
    *,
    written: bool = True,
) -> str:
    """Return the output of a run with flags `after` that resumes a run with flags `before`."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("{}\n")
    always = [
        "--model.model_name_or_path",
        "m",
        "--data.dataset",
        str(folder / "rows.jsonl"),
        "--run.quiet",
    ]
    Recorder(parse_config(SFTConfig, [*always, *before], command="train_sft"), str(folder)).close()
    if not written:
        (folder / "config_resolved.yaml").unlink()
    config = parse_config(SFTConfig, [*always, *after], command="train_sft")
    capsys.readouterr()
    Recorder(config, str(folder), resume_step=2).close()
    return capsys.readouterr().err


def test_resumed_run_prints_old_and_new_values_of_changed_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ["--adam.lr", "1e-3", "--lr_scheduler", "constant", "--adam.betas", "0.9", "0.95"]
    after = ["--adam.lr", "2e-3", "--adam.weight_decay", "0.1", "--train.seed", "7"]
    after += ["--adam.betas", "0.9", "0.95"]
    printed = resumed_notices(tmp_path, before, after, capsys)
    assert printed.count("[notice]") == 1
    expected = {
        "--adam.lr 0.002 (before: 0.001)",
        "--adam.weight_decay 0.1 (before: 0.0)",
        "--lr_scheduler cosine_with_min_lr (before: constant)",
        "--train.seed 7 (before: 42)",
    }
    assert all(change in printed for change in expected)
    assert printed.count("(before: ") == len(expected)


def test_resumed_run_does_not_print_changed_output_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lr = ["--adam.lr", "1e-3"]
    places = ["--ckpt.load_enable", "--ckpt.save_steps", "3", "--ckpt.output_dir", "e"]
    places += ["--ds.zero_stage", "3"]
    places += ["--logger.logging_steps", "2", "--run.json"]
    places += ["--logger.tensorboard_dir", str(tmp_path / "t")]
    assert resumed_notices(tmp_path / "same", lr, lr, capsys) == ""
    assert resumed_notices(tmp_path / "places", [], places, capsys) == ""
    assert resumed_notices(tmp_path / "lost", [], lr, capsys, written=False) == ""


def test_new_run_moves_files_of_earlier_run_in_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_steps(recorder(tmp_path), 1, 3)
    assert "earlier run" not in capsys.readouterr().out
    log_steps(recorder(tmp_path), 1, 1)
    assert str(tmp_path / "earlier/1") in capsys.readouterr().out.replace("\n", " ")
    assert {row["step"] for row in rows(tmp_path, "metrics.jsonl")} == {1}
    assert {row["step"] for row in rows(tmp_path / "earlier/1", "metrics.jsonl")} == {1, 2, 3}


def test_config_file_begins_with_command_and_startup_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "notices", ["Few rows."])
    monkeypatch.setattr("sys.argv", ["/bin/openrlhf", "sft", "--train.seed", "1"])
    recorder(tmp_path).close()
    comments = (tmp_path / "config.yaml").read_text().splitlines()[:2]
    assert comments == ["# openrlhf sft", "# Few rows."]


def test_logging_steps_skips_steps_but_not_evaluations(tmp_path: Path) -> None:
    log_steps(recorder(tmp_path, logging_steps=2), 1, 4)
    logged = [(row["step"], "train/loss" in row) for row in rows(tmp_path, "metrics.jsonl")]
    assert logged == [(1, False), (2, True), (2, False), (3, False), (4, True), (4, False)]


def test_failed_episodes_are_logged_in_addition_to_successful_ones(tmp_path: Path) -> None:
    many = [episode(0, i, score=1.0) for i in range(SAMPLES_PER_STEP + 5)]
    recorder(tmp_path).samples(1, [*many, failed(1, 0)])
    written = rows(tmp_path, "samples.jsonl")
    assert len(written) == SAMPLES_PER_STEP + 1
    assert (written[-1]["stop_reason"], written[-1]["error"]) == ("failed", "it broke")


def test_rare_failure_kind_is_logged_despite_a_frequent_one(tmp_path: Path) -> None:
    late = [failed(0, i).failing("slow", Failure.TIMEOUT) for i in range(SAMPLES_PER_STEP + 5)]
    recorder(tmp_path).samples(1, [*late, failed(1, 0).failing("gone", Failure.EXIT)])
    kinds = [row["failure"] for row in rows(tmp_path, "samples.jsonl")]
    assert kinds == ["timeout", "exit", *["timeout"] * (SAMPLES_PER_STEP - 2)]


def test_filtered_episodes_are_logged_in_addition_to_kept_ones(tmp_path: Path) -> None:
    many = [episode(0, i, score=1.0) for i in range(SAMPLES_PER_STEP + 5)]
    recorder(tmp_path).samples(1, [*map(thrown_away, many), *many])
    written = rows(tmp_path, "samples.jsonl")
    kept, filtered = written[:SAMPLES_PER_STEP], written[SAMPLES_PER_STEP:]
    assert not any(row["filtered"] for row in kept)
    assert [row["filtered"] for row in filtered] == [True] * SAMPLES_PER_STEP
    assert {row["reward"] for row in written} == {1.0}


def test_evaluation_logs_one_successful_sample_for_each_first_prompt(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    many = [episode(prompt, sample, score=1.0) for prompt in range(9) for sample in range(2)]
    made.evaluation(0, {"eval/score": 0.5}, [failed(0, 0), *many[1:]])
    made.evaluation(4, {"eval/score": 0.5}, many)
    kept = [
        (row["step"], row["prompt_index"], row["sample_index"])
        for row in rows(tmp_path, "samples.jsonl")
    ]
    prompts = range(SAMPLES_PER_EVALUATION)
    assert kept.pop(SAMPLES_PER_EVALUATION) == (0, 0, 0)  # the failed sample
    assert kept == [
        (0, 0, 1),
        *[(0, prompt, 0) for prompt in prompts[1:]],
        *[(4, prompt, 0) for prompt in prompts],
    ]
    assert all(row["evaluation"] for row in rows(tmp_path, "samples.jsonl"))


def log_dead_groups(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step(step, {"train/dead_groups": 1.0})


def test_notice_appears_once_on_terminal_and_in_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorder(tmp_path)
    log_dead_groups(made, 1, 4)
    assert "[notice]" not in capsys.readouterr().out
    log_dead_groups(made, 5, 20)
    made.close()
    printed = capsys.readouterr().out
    notice = "Steps 1 to 5: train/dead_groups is 1. "
    assert printed.count("[notice] ") == printed.count(notice) == 1
    assert (tmp_path / "report.html").read_text().count(notice) == 1


def test_notices_consider_steps_that_are_not_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorder(tmp_path, logging_steps=10)
    log_dead_groups(made, 1, 6)
    made.step(7, {"train/loss": math.nan})
    made.step(8, {"train/loss": 1.0})
    printed = capsys.readouterr().out
    assert "[notice] Steps 1 to 5: train/dead_groups is 1." in printed
    assert "[notice] Step 7: train/loss is nan." in printed
    # Only the steps with a notice are logged.
    assert [row["step"] for row in rows(tmp_path, "metrics.jsonl")] == [5, 7]
    made.close()
    report = (tmp_path / "report.html").read_text()
    for notice in ("Steps 1 to 5: train/dead_groups is 1.", "Step 7: train/loss is nan."):
        assert report.count(notice) == 1
    resumed = recorder(tmp_path, resume_step=8, logging_steps=10)
    log_dead_groups(resumed, 9, 20)
    assert "[notice]" not in capsys.readouterr().out


def test_notice_of_a_step_after_the_checkpoint_is_repeated_by_the_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dead_groups(recorder(tmp_path, logging_steps=10), 1, 6)
    capsys.readouterr()
    resumed = recorder(tmp_path, resume_step=4, logging_steps=10)
    assert rows(tmp_path, "notices.jsonl") == []
    log_dead_groups(resumed, 5, 9)
    assert "[notice] Steps 5 to 9: train/dead_groups is 1." in capsys.readouterr().out


def test_resumed_run_continues_curves_and_does_not_repeat_notices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dead_groups(recorder(tmp_path), 1, 3)
    log_dead_groups(recorder(tmp_path, resume_step=3), 4, 6)
    assert "[notice] Steps 1 to 5: " in capsys.readouterr().out
    log_dead_groups(recorder(tmp_path, resume_step=6), 7, 20)
    assert "[notice]" not in capsys.readouterr().out


def test_close_prints_notices_of_end_of_run_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorder(tmp_path)
    for step, score in ((0, 0.5), (8, 0.3)):
        made.evaluation(step, {"eval/eval_x_pass1": score, "eval/eval_x_score_stderr": 0.02})
    assert "[notice]" not in capsys.readouterr().out
    made.close()
    notice = "Step 8: eval/eval_x_pass1 is 0.3 (at the start 0.5)."
    assert f"[notice] {notice}" in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().count(notice) == 1
    resumed = recorder(tmp_path, resume_step=8)
    assert rows(tmp_path, "notices.jsonl") == []  # the resumed run may regain the score
    resumed.close()
    assert notice in capsys.readouterr().out
    again = recorder(tmp_path, resume_step=8)
    assert rows(tmp_path, "notices.jsonl") == []  # the run that logged no step stored it at step 9
    again.close()
    assert notice in capsys.readouterr().out


def test_close_writes_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorder(tmp_path)
    log_steps(made, 1, 2)
    made.close()
    assert "loss 1.000 → 2.000" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path / "report.html") in capsys.readouterr().out


def test_first_error_of_each_kind_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorder(tmp_path)
    slow, broken = Failure.TIMEOUT, Failure.EXCEPTION
    errors = [
        (slow, "slow one"),
        (slow, "slow two"),
        (broken, "Traceback:\n  line\nValueError: bad label"),
    ]
    episodes = [
        replace(failed(0, n), failure=kind, error=text) for n, (kind, text) in enumerate(errors)
    ]
    made.evaluation(0, {"eval/score": 0.5}, episodes[:1])
    made.samples(1, episodes)
    made.samples(2, episodes)
    shown = capsys.readouterr().out
    assert shown.count("slow one") == 1
    assert "slow two" not in shown
    assert shown.count("ValueError: bad label") == 1
