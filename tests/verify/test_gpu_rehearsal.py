"""Rehearses the GPU checks on a CPU with small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.verify
OPTIONS = ("--rehearse", "--minutes", "30")  # enough for every check on two cores


def test_all_gpu_checks_that_can_run_on_a_cpu_pass(tmp_path: Path) -> None:
    output = tmp_path / "seen.json"
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", *OPTIONS, "--output", str(output)], check=False
    )
    outcomes = {
        node.split("::")[1]: seen["outcome"]
        for node, seen in json.loads(output.read_text())["checks"].items()
    }
    assert outcomes.pop("test_weights_are_sent_to_another_gpu_by_nccl") == "skipped"
    assert (
        outcomes.pop("test_packed_rows_get_the_same_scores_as_single_rows[flash_attention_2]")
        == "skipped"
    )
    assert set(outcomes.values()) == {"passed"}, outcomes
