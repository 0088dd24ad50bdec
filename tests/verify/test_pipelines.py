"""Every example of a pipeline runs to its end on a laptop, learns, and is done when it is started again."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import column
from tests.ranks import ROOT

PASS_AT_1 = "eval/eval_sort_pass1"
# A run of an example whose held-out pass@1 is larger at the end than at the beginning, or after than in another run.
LIFTED = {
    "instructgpt": ("ppo", "ppo"),
    "r1": ("grpo", "grpo"),
    "llama2": ("ppo", "ppo"),
    "raft": ("passed_1", "passed_2"),
    "iterative_dpo": ("passed_1", "passed_2"),
    "compare": ("passed_start_1", "passed_grpo_1"),
}
pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]


def run(example: str, folder: Path) -> str:
    line = [
        sys.executable,
        "-m",
        "openrlhf.cli.main",
        "pipeline",
        f"examples/pipelines/{example}.yaml",
        "--run.dir",
        folder,
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("example", LIFTED)
def test_an_example_learns_and_is_done(example: str, tmp_path: Path) -> None:
    text = (ROOT / f"examples/pipelines/{example}.yaml").read_text()
    if "batch_inference" in text and not importlib.util.find_spec("openrlhf.config.inference"):
        pytest.skip("no batch_inference")
    run(example, tmp_path)
    before, after = LIFTED[example]
    assert column(tmp_path / after, PASS_AT_1)[-1] > column(tmp_path / before, PASS_AT_1)[0]
    *stages, last = run(example, tmp_path).splitlines()
    assert all(line.endswith(": done") for line in stages) and last.startswith("All stages are done.")
    report = (tmp_path / "report.html").read_text()
    assert all(f">{line.partition(':')[0]}</" in report for line in stages)
    if example == "compare":
        groups = ("Start", "SFT", "DPO", "KTO", "Rejection sampling", "PPO", "GRPO")
        assert all(f"<td>{group}</td><td>3</td>" in report for group in groups)
