"""End-to-end test of a pipeline that is terminated in its last stage and resumed.

The test also checks which stages rerun after a flag changes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import column, finish, steps_logged
from tests.ranks import ROOT

EXAMPLE = ROOT / "examples/pipelines/zephyr.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write the example pipeline with a quarter of its rows."""
    text = (
        EXAMPLE.read_text()
        .replace("{{ here }}", str(EXAMPLE.parent))
        .replace("data.max_samples: 2560", "data.max_samples: 640")
    )
    path = tmp_path / "zephyr.yaml"
    path.write_text(text.replace("ckpt.save_steps: 10", "ckpt.save_steps: 2"))
    return path


def start(file: Path, *words: str) -> subprocess.Popen[str]:
    line = [
        sys.executable,
        "-m",
        "openrlhf.cli.main",
        "pipeline",
        str(file),
        "--run.dir",
        str(file.parent / "run"),
        *words,
    ]
    return subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_terminated_pipeline_resumes_in_its_stage_and_changes_rerun_only_affected_stages(
    file: Path,
) -> None:
    folder = file.parent / "run"
    pipeline = start(file)
    while steps_logged(folder / "dpo") < 5:
        assert pipeline.poll() is None, pipeline.communicate()
        time.sleep(0.05)
    os.kill(pipeline.pid, signal.SIGTERM)
    ended = finish(pipeline)
    assert ended.status == 143 and "the same command" in ended.errors
    assert not (folder / "dpo/model").exists()
    before = steps_logged(folder / "dpo")
    first = (folder / "dpo/metrics.jsonl").read_text().splitlines()[0]

    again = finish(start(file))
    assert again.status == 0, again.errors
    assert [
        line
        for line in again.printed.splitlines()
        if line.partition(":")[0] in ("task", "sft", "dpo")
    ] == [
        "task: done",
        "sft: done",
        "dpo: resumes",
    ]
    assert 5 <= before < 10 and (folder / "dpo/metrics.jsonl").read_text().startswith(
        first
    )  # each line ends with a duration
    assert len(column(folder / "dpo", "train/loss")) == 10
    assert "separate report" in (folder / "report.html").read_text()

    file.write_text(
        file.read_text().replace("command: dpo", "command: dpo\n    group: a", 1)
    )  # this flag has no effect on the stage's result
    assert finish(start(file, "--dry_run")).printed.splitlines() == [
        "task: done",
        "sft: done",
        "dpo: done",
    ]
    file.write_text(file.read_text().replace("adam.lr: 1e-4", "adam.lr: 2e-4"))
    said = finish(start(file, "--dry_run")).printed.splitlines()
    assert said == ["task: done", "sft: done", "dpo: runs again; changed: --adam.lr"]
    file.write_text(file.read_text().replace("adam.lr: 1e-3", "adam.lr: 2e-3"))
    said = finish(start(file, "--dry_run")).printed.splitlines()
    assert said[1:] == [
        "sft: runs again; changed: --adam.lr",
        "dpo: runs again; changed: --adam.lr, ${sft}",
    ]
