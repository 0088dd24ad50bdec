"""The run folder: writing, reading, and resuming after a kill."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.core.trajectory import Prompt, StopReason, Trajectory
from openrlhf.observability.run_folder import RunFolder, read_lines, sample_row

ROW = {
    "step": 1,
    "response": "4",
    "reward": 1.0,
    "scores": {"score": 1.0},
    "stop_reason": "stop",
    "error": None,
}


def lines_of(path: Path) -> list[dict]:
    """Parse every line strictly, because NaN and infinity are not JSON."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_new_folder_has_logs_and_empty_files(tmp_path):
    RunFolder(tmp_path / "runs" / "first")
    assert (tmp_path / "runs/first/logs").is_dir()
    assert (tmp_path / "runs/first/metrics.jsonl").read_text() == ""


def test_each_log_call_writes_one_object_with_step_time_and_metrics(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log_metrics(12, {"train/kl": 0.25})
    folder.log_metrics(12, {"eval/eval_loss": 2})
    train, evaluation = lines_of(tmp_path / "metrics.jsonl")
    assert train.pop("time") == pytest.approx(evaluation.pop("time"), abs=60)
    assert train == {"step": 12, "train/kl": 0.25}
    assert evaluation == {"step": 12, "eval/eval_loss": 2.0}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nonfinite_number_is_written_as_null(tmp_path, number):
    folder = RunFolder(tmp_path)
    folder.log_metrics(1, {"train/policy_loss": number, "train/kl": 0.5})
    folder.log_samples([ROW | dict(reward=number, scores={"score": number})])
    (row,) = lines_of(tmp_path / "metrics.jsonl")
    assert row["train/policy_loss"] is None
    assert row["train/kl"] == 0.5
    (sample,) = lines_of(tmp_path / "samples.jsonl")
    assert sample["reward"] is None
    assert sample["scores"] == {"score": None}


def test_sample_row_has_documented_keys(tmp_path):
    trajectory = Trajectory(
        tokens=[5, 6],
        action_mask=[False, True],
        rollout_logprobs=[0.0, -0.1],
        prompt=Prompt(index=7, text="2+2=", tokens=[5]),
        sample_index=3,
        stop_reason=StopReason.LENGTH,
        reward=0.5,
        score=1.0,
        weight_versions=(4, 5),
        extra_logs={"format": 0.25},
        response_text="4",
    )
    RunFolder(tmp_path).log_samples([sample_row(9, trajectory)])
    assert lines_of(tmp_path / "samples.jsonl") == [
        {
            "step": 9,
            "prompt_index": 7,
            "sample_index": 3,
            "prompt": "2+2=",
            "label": "",
            "response": "4",
            "reward": 0.5,
            "scores": {"score": 1.0, "format": 0.25},
            "stop_reason": "length",
            "weight_versions": [4, 5],
            "error": None,
            "failure": None,
            "filtered": False,
            "evaluation": False,
        }
    ]


@pytest.mark.parametrize("text", ['a "b"\n\r\u2028c', "日本語 🙂", "\ud800 lone", "\x00"])
def test_sample_with_any_text_is_one_line(tmp_path, text):
    folder = RunFolder(tmp_path)
    folder.log_samples([ROW | dict(response=text), ROW])
    rows = list(read_lines(tmp_path / "samples.jsonl"))
    assert [row["response"] for row in rows] == [text.replace("\ud800", "?"), "4"]


def test_logged_lines_survive_sigkill(tmp_path):
    program = (
        "import os, signal; from openrlhf.observability.run_folder import RunFolder\n"
        f"folder = RunFolder({str(tmp_path)!r})\n"
        "for step in (1, 2, 3): folder.log_metrics(step, {'train/kl': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert [row["step"] for row in lines_of(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("unfinished", ['{"step": 3, "ti', "{", '{"step": 3}', "x" * 200_000])
def test_resume_removes_incomplete_last_line(tmp_path, unfinished):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + unfinished)
    (tmp_path / "samples.jsonl").write_text(unfinished)
    folder = RunFolder(tmp_path, resume_step=2)
    folder.log_metrics(3, {})
    folder.log_samples([ROW])
    assert [row["step"] for row in lines_of(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert len(lines_of(tmp_path / "samples.jsonl")) == 1


def test_resume_removes_lines_after_resume_step(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 2, 3, 4):
        folder.log_metrics(step, {"train/kl": step / 10})
        folder.log_samples([ROW | dict(step=step)])
    folder.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 5, "half')
    resumed = RunFolder(tmp_path, resume_step=2)
    resumed.log_metrics(3, {"train/kl": 9.0})
    resumed.log_samples([ROW | dict(step=3)])
    metrics = lines_of(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/kl"]) for row in metrics] == [
        (1, 0.1),
        (2, 0.2),
        (2, 0.2),
        (3, 9.0),
    ]
    assert [row["step"] for row in lines_of(tmp_path / "samples.jsonl")] == [1, 2, 2, 3]


def test_resume_reads_and_writes_only_the_removed_lines(tmp_path):
    """A run of a week has gigabytes of samples: here, most of the file is a hole."""
    samples = tmp_path / "samples.jsonl"
    with samples.open("wb") as file:
        file.truncate(4 * 2**30)  # takes no space
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 7}\n{"step": 8}\n{"step": 9, "prompt"')
    RunFolder(tmp_path, resume_step=7)
    assert samples.stat().st_size == 4 * 2**30 + len(b'\n{"step": 7}\n')


def test_resume_keeps_earlier_lines_unchanged(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log_metrics(1, {"train/kl": 1 / 3, "train/policy_loss": math.nan})
    before = (tmp_path / "metrics.jsonl").read_text()
    folder.close()
    RunFolder(tmp_path, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "logs",
        "metrics.jsonl",
        "notices.jsonl",
        "samples.jsonl",
    ]


def test_new_run_moves_files_of_earlier_runs(tmp_path):
    for kl in (0.1, 0.2, 0.3):
        folder = RunFolder(tmp_path)
        folder.write_config(f"kl: {kl}\n", f"kl: {kl}\nseed: 1\n")
        folder.log_metrics(1, {"train/kl": kl})
        folder.close()
    assert (tmp_path / "config.yaml").read_text() == "kl: 0.3\n"
    assert (tmp_path / "config_resolved.yaml").read_text() == "kl: 0.3\nseed: 1\n"
    assert (tmp_path / "earlier/1/config.yaml").read_text() == "kl: 0.1\n"
    assert lines_of(tmp_path / "earlier/2/metrics.jsonl")[0]["train/kl"] == 0.2
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1


def test_read_lines_skips_unrelated_lines_and_missing_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('{"step": 1}\n\nnonsense\n[1]\n{"other": 2}\n{"step": 2}\n{"step"')
    assert [row["step"] for row in read_lines(path)] == [1, 2]
