"""Tests for `make test-gpu` without a GPU: checks are independent, and all output is recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.gpu.run import CHECKS, FOLDER, MORE, run

FILE = """
import os, time
def test_passes(record_property): record_property("tokens_per_second", 7)
def test_fails(): raise AssertionError("as it should")
def test_hangs():
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
def test_dies(): os.abort()
"""


def test_check_that_fails_hangs_or_crashes_does_not_stop_others(tmp_path: Path) -> None:
    file, output = tmp_path / "test_it.py", tmp_path / "seen.json"
    file.write_text(FILE)
    assert not run(
        {
            (f"{file}::test_dies",): 10,
            (f"{file}::test_hangs",): 10,
            (f"{file}::test_fails", f"{file}::test_passes"): 30,
        },
        output,
    )
    seen = {
        node.split("::")[1]: result
        for node, result in json.loads(output.read_text())["checks"].items()
    }
    assert {name: result["outcome"] for name, result in seen.items()} == {
        "test_dies": "failed",
        "test_hangs": "out of time",
        "test_fails": "failed",
        "test_passes": "passed",
    }
    assert "in test_hangs" in seen["test_hangs"]["said"]
    assert "as it should" in seen["test_fails"]["said"]
    assert seen["test_passes"]["tokens_per_second"] == "7"


def test_run_that_skips_all_checks_is_not_a_success(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\ndef test_skipped(): pytest.skip('no GPU')\n")
    assert not run({(f"{file}::test_skipped",): 30}, tmp_path / "seen.json")


def test_checks_are_listed_but_not_run_if_no_time_is_left(tmp_path: Path) -> None:
    assert not run({("test_it.py::test_none",): 10}, tmp_path / "seen.json", minutes=0)
    assert json.loads((tmp_path / "seen.json").read_text())["checks"] == {
        "test_it.py::test_none": {"outcome": "no time left"}
    }


def test_further_checks_run_only_if_their_whole_time_limit_is_left(tmp_path: Path) -> None:
    file, output = tmp_path / "test_it.py", tmp_path / "seen.json"
    file.write_text("def test_passes(): pass\ndef test_fails(): raise AssertionError\n")
    passes, fails = (f"{file}::test_passes",), (f"{file}::test_fails",)
    assert run({passes: 60}, output, minutes=1, more={fails: 100})
    outcomes = [each["outcome"] for each in json.loads(output.read_text())["checks"].values()]
    assert outcomes == ["passed", "no time left"]
    assert not run({}, output, minutes=1, more={fails: 30})


def test_every_check_is_run() -> None:
    files = {path.name: path.read_text() for path in Path(FOLDER).glob("test_*.py")}
    listed = {node for nodes in CHECKS | MORE for node in nodes}
    for name, text in files.items():
        for test in re.findall(r"^def (test_\w+)", text, re.MULTILINE):
            assert name in listed or f"{name}::{test}" in listed, f"{name}::{test}"
