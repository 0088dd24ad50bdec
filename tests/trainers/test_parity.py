"""Tests that ranks that share data, sequences or layers train as one process does.

`make verify` runs the full matrix.
"""

import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT


def test_every_layout_of_ranks_gives_the_same_result_as_one_process(tmp_path: Path):
    # The ranks must be forked before any thread is started, hence the separate process.
    command = [sys.executable, "-m", "tests.trainers.parity", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
