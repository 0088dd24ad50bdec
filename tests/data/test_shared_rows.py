"""Rows are prepared once per machine and shared by all processes launched on that machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.shared_rows_job import BROKEN, seen
from tests.ranks import run_ranks


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder that all processes use."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_two_processes_prepare_rows_once_and_get_the_same_rows(
    temporary: Path, tmp_path: Path
) -> None:
    run_ranks(2, "tests.data.shared_rows_job", str(tmp_path), "training", "evaluation")
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(list(tmp_path.glob("evaluation-*"))) == 1
    for case in ("training", "evaluation"):
        alone = json.loads(json.dumps(seen(tmp_path, case)))
        assert [report[case] for report in reports] == [alone, alone]
    assert [report["mapped"] for report in reports] == [
        True,
        True,
    ]  # rows are read from memory-mapped pages, not copied
    assert list(temporary.glob("openrlhf-rows-*")) == []


def test_broken_row_raises_the_same_error_in_both_processes_and_leaves_no_files(
    temporary: Path, tmp_path: Path
) -> None:
    run_ranks(2, "tests.data.shared_rows_job", str(tmp_path), "broken")
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    expected = f"the dataset, row {BROKEN + 1}, column 'text': is odd."
    assert [report["broken"] for report in reports] == [expected, expected]
    assert list(temporary.glob("openrlhf-rows-*")) == []


def test_waiting_process_takes_over_if_the_preparing_process_is_killed(
    temporary: Path, tmp_path: Path
) -> None:
    """The waiting process prepares the rows, then exits because the other process died."""
    with pytest.raises(AssertionError, match="ended with"):
        run_ranks(2, "tests.data.shared_rows_job", str(tmp_path), "killed", timeout=300)
    assert len(list(tmp_path.glob("killed-*"))) == 2
