"""The demo's final output, produced from stage logs. `make verify` runs the demo itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.run import StageResult, conclude

LOGGED = {
    "SFT": {"train/loss": 1.0},
    "RM": {"eval/acc_mean": 0.75},
    "PPO": {"eval/eval_sort_pass1": 0.5, "eval/eval_sort_reward_mean": -0.25, "train/kl": 0.125},
    "GRPO": {"eval/eval_sort_pass1": 0.625, "train/kl": 0.0625},
}


def test_demo_ends_with_a_table_that_is_also_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {}
    for name, numbers in LOGGED.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "time": 0.0, **numbers}) + "\n"
        )
        stages[name] = StageResult(name=name, folder=folder, seconds=1.0)
    report = conclude(stages, tmp_path, title="the demo")
    printed = capsys.readouterr().out
    for number in ("0.750", "0.500", "-0.250", "0.125", "0.625", "0.062"):
        assert number in printed and number in report.read_text()
