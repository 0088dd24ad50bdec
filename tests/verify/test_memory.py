"""Tests that the planner predicts the memory of real training processes on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import compare, read_records
from openrlhf.planning.constants import CPU
from tests.ranks import ROOT

pytestmark = pytest.mark.verify
LARGEST_ERROR = 0.1
# Names of the measured cases: stages 1 to 3, with one and two ranks and with both data types.
CASES = (
    "llama-27M, policy, zero 1",
    "llama-27M, policy, zero 2, ranks 2, bf16",
    "llama-27M, sft, zero 3, ranks 2",
)


@pytest.mark.timeout(1200)
def test_measured_memory_is_within_ten_percent_of_the_prediction(tmp_path: Path) -> None:
    # The ranks must be forked before any thread is started, hence the separate process.
    records = tmp_path / "memory.jsonl"
    command = [sys.executable, "-m", "benchmarks.memory", "measure", "--case", *CASES]
    command += ["--models", str(tmp_path), "--records", str(records)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = compare(read_records(records), tmp_path, CPU)
    assert len({row.case for row in rows}) == len(CASES)
    for row in rows:
        assert abs(row.error) <= LARGEST_ERROR, (row.case.name, row.instant, row.error)
