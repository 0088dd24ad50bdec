"""Compares synchronous and asynchronous training in an environment with random latency.

The results are written to a page in docs/results/.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.ranks import ROOT
from tests.verify.results import write_result

pytestmark = pytest.mark.verify
NUMBERS = (
    r"synchronous ([\d.]+) s, asynchronous ([\d.]+) s per step: ([\d.]+) x\nthe simulator predicts "
    r"([\d.]+) x"
)


@pytest.mark.timeout(1800)
def test_synchronous_and_asynchronous_speeds_are_recorded() -> None:
    """Speeds are not asserted because they depend on the machine and its load."""
    rows = []
    for queue, staleness in ((2, 16), (4, 16)):
        command = ["-m", "benchmarks.latency", "--queue", str(queue), "--staleness", str(staleness)]
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        found = re.search(NUMBERS, done.stdout)
        assert found, done.stdout
        *_, gained, predicted = map(float, found.groups())
        rows.append([queue, staleness, *found.groups(), f"{gained / predicted:.2f}"])
    write_result(
        "latency",
        "Asynchronous training with a slow environment",
        "python -m pytest -m verify tests/verify/test_latency.py",
        [
            "queue",
            "staleness",
            "synchronous, s per step",
            "asynchronous",
            "times as fast",
            "simulator",
            "measured / simulator",
        ],
        rows,
        "`python -m benchmarks.latency`: 16 prompts × 4 samples on one engine with a model of 3 M "
        "parameters and partial rollouts. Each sample waits for its environment. The wait is "
        "log-normal with a median of 1 s; the slowest 1 % take ten times as long.",
    )
