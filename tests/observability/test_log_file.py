"""Tests for logging to a full disk: no errors are raised, and logging resumes later."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.config.options import parse_config
from openrlhf.config.supervised import SFTConfig
from openrlhf.observability import log_file
from openrlhf.observability.log_file import LogFile
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import METRICS, read_lines
from tests.full_disk import files_of_at_most

FULL = Path("/dev/full")  # every write fails, as it would on a full disk


def test_pending_lines_are_written_in_order_once_disk_has_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = LogFile(tmp_path / "log")
    file.write("first line\n")
    with files_of_at_most(15):
        file.write("second line\n")
        file.write("third line\n")
    file.write("fourth line\n")
    file.close()
    assert (tmp_path / "log").read_text() == "first line\nsecond line\nthird line\nfourth line\n"
    assert capsys.readouterr().err.count(str(tmp_path / "log")) == 1


@pytest.mark.usefixtures("capsys")  # otherwise printed text would also be written to a file
def test_lines_are_dropped_if_too_many_are_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "MAX_PENDING_BYTES", 8)
    file = LogFile(tmp_path / "log")
    with files_of_at_most(0):
        for number in range(100):
            file.write(f"line {number}\n")
    file.write("last\n")
    file.close()
    assert (tmp_path / "log").read_text() == "line 0\nline 1\nlast\n"


def test_recorder_on_full_disk_keeps_all_metrics_and_closes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(tmp_path / "run")
    words = ["--model.model_name_or_path", "m", "--data.dataset", "d", "--run.dir", run_dir]
    recorder = Recorder(parse_config(SFTConfig, words, command="train_sft"), run_dir)
    recorder.step(1, {"train/gpt_loss": 1.0})
    with files_of_at_most(0):
        recorder.step(2, {"train/gpt_loss": 0.5})
        recorder.folder.write_config("a: 1\n", "a: 1\n")
    recorder.step(3, {"train/gpt_loss": 0.25})
    with files_of_at_most(0):
        recorder.close()
    assert [row["step"] for row in read_lines(tmp_path / "run" / METRICS)] == [1, 2, 3]
    assert "report.html" in capsys.readouterr().err


def test_log_file_on_full_device_does_not_raise(capsys: pytest.CaptureFixture[str]) -> None:
    file = LogFile(FULL)
    file.write("a\n")
    file.close()
    assert str(FULL) in capsys.readouterr().err
