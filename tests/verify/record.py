"""A pytest plugin of tests/conftest.py: the last outcome of every test marked `verify`, on a page of docs/results/."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

import pytest

from tests.ranks import ROOT
from tests.verify.results import FOLDER, versions, write_result

RECORDS = FOLDER / "verify.jsonl"
Row = Mapping[str, object]


class Verified:
    """Collects the outcomes of a session, and puts them on record at its end."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a verification that passed, or failed while it was set up, run or torn down."""
        if "verify" in report.keywords and (report.failed or (report.when == "call" and report.passed)):
            self.rows.append({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration)})

    def pytest_sessionfinish(self) -> None:
        """Replace the records of the tests that ran."""
        if self.rows:
            put_on_record(self.rows)


def commit() -> str:
    """The commit that is checked out, with a + if the package was changed since."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changes = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "openrlhf"], cwd=ROOT)
    return head.stdout.strip() + "+" * bool(changes.returncode)


def put_on_record(rows: list[Row]) -> None:
    """Add outcomes to the records, each in place of an earlier one of its test, and write the page anew."""
    of_now = {"code": commit(), "versions": versions()}
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    kept = {row["test"]: row for row in [*map(json.loads, lines), *({**row, **of_now} for row in rows)]}
    known = [kept[test] for test in sorted(kept)]
    RECORDS.write_text("".join(json.dumps(row) + "\n" for row in known), encoding="utf-8")
    write_result(
        "verify",
        "Long verifications",
        "make verify",
        ["test", "outcome", "seconds", "code"],
        [["`" + row["test"].replace("|", "\\|") + "`", row["outcome"], row["seconds"], row["code"]] for row in known],
        "The last outcome of each test that `make test` leaves out, and the commit that it ran on. A test that is not here has not been run yet, or has a page of its own.",
    )
