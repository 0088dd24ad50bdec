"""Tests for tokenizing large datasets in several processes.

The tokenizing processes leave no files behind, even if the command is terminated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data import rows
from openrlhf.data.sft import SFTDataset
from tests.data.small import build_tokenizer
from tests.e2e.processes import descendants, survivors
from tests.sources import ROOT

PROGRAM = "from tests.data.terminated_rows import tokenize_slowly; tokenize_slowly(100_000)"


def test_tables_of_many_rows_are_removed_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "MANY_ROWS", 100)
    monkeypatch.setattr(rows, "usable_cores", lambda: 2)
    table = Dataset.from_list([{"input": "a", "output": str(number)} for number in range(1000)])
    trained = SFTDataset(table, build_tokenizer(), SFTDataConfig(output_key="output"))
    assert "1000 rows" in capsys.readouterr().err
    assert [*Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")] == []
    few = SFTDataset(table.select([998]), build_tokenizer(), SFTDataConfig(output_key="output"))
    assert (len(trained), trained[998]) == (1000, few[0])


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.verify)],
)
def test_command_terminated_during_tokenization_exits_cleanly(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"HF_DATASETS_CACHE": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not [*tmp_path.rglob("*.arrow"), *tmp_path.rglob("openrlhf-rows-*/tmp*")]:
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)
    family = descendants(command.pid)
    if number == signal.SIGINT:
        os.killpg(command.pid, number)  # signal the process group, as Ctrl-C does
    else:
        command.send_signal(number)
    _, errors = command.communicate(timeout=120)
    assert (command.returncode, "Traceback" in errors) == (status, False), errors
    assert survivors(family, within=60) == []
    assert [*tmp_path.iterdir()] == []
