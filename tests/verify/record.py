"""Records of `make verify`: the last outcome of every test marked `verify`.

A record contains the commit and the date. `Verified` is a pytest plugin that tests/conftest.py
registers. The plugin writes each outcome as soon as the test ends, so that an aborted session loses
nothing, and skips tests that have already passed on the same code. `--shard 2/5` selects one of
five parts of the tests; all parts take about the same time.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.verify.results import FOLDER, packages

RECORDS = FOLDER / "verify.jsonl"
PAGE = FOLDER / "verify.md"
# The paths of the code that verification depends on; pages and records are excluded.
CODE = ("openrlhf", "tests", "examples", "benchmarks", "pyproject.toml", "requirements")
UNKNOWN_SECONDS = 60.0  # assumed duration of a test without a record
# If a file takes longer than this limit, its tests are distributed across shards one by one.
# The tests in a shorter file stay together because they share their setup.
LARGE_FILE_SECONDS = 1200.0
MOST_MINUTES = 90.0  # maximum duration of one shard


@dataclass(frozen=True, kw_only=True)
class Record:
    """The last outcome of a test.

    `commit` is the full hash of the tested commit; `date` is a day such as 2026-11-26.
    """

    test: str
    outcome: str
    seconds: int
    commit: str
    date: str
    packages: str


def read_records(path: Path = RECORDS) -> dict[str, Record]:
    """Return the records, keyed by test."""
    records = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = Record(**json.loads(line))
            records[record.test] = record
    return records


def write_records(records: Iterable[Record], path: Path = RECORDS) -> None:
    """Write the records, sorted by test."""
    lines = [
        json.dumps(asdict(record)) + "\n"
        for record in sorted(records, key=lambda record: record.test)
    ]
    path.write_text("".join(lines), encoding="utf-8")


# ---- git


def git(*words: str) -> str:
    """Run a git command and return its output.

    Raises CalledProcessError if the command fails.
    """
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def uncommitted() -> str:
    """Return the uncommitted changes to the code, as listed by git."""
    return git("status", "--porcelain", "--", *CODE)


@cache
def changes_since(commit: str) -> int | None:
    """Return how many later commits changed the code.

    Return None if `commit` is not in the history of HEAD.
    """
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True
    )
    if known.returncode:
        return None
    return int(git("rev-list", "--count", f"{commit}..HEAD", "--", *CODE))


# ---- the page


def page(records: Sequence[Record], ages: dict[str, int | None]) -> str:
    """Return the page with all records, oldest first.

    `ages` maps a commit to the number of later commits that changed the code.
    """
    by_age = sorted(
        records, key=lambda record: (record.date, -(ages[record.commit] or 0), record.test)
    )
    lines = ["# Long verifications", ""]
    if by_age:
        oldest = by_age[0]
        lines.append(
            f"**The oldest row is of {oldest.date}, commit {oldest.commit[:7]}; "
            f"{ages[oldest.commit]} later commits changed the code.** Ages are as of the day this "
            "page was written."
        )
    lines += [
        "",
        (
            "`make verify` runs each test that `make test` skips and records its last outcome "
            "here. A test that is not listed has"
        ),
        "not been run yet or has its own page.",
        "",
        "| test | outcome | seconds | commit | date | later commits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for record in by_age:
        name = record.test.replace("|", "\\|")
        cells = (
            f"`{name}`",
            record.outcome,
            record.seconds,
            record.commit[:7],
            record.date,
            ages[record.commit],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Write the page from the records."""
    records = list(read_records().values())
    ages = {record.commit: changes_since(record.commit) for record in records}
    PAGE.write_text(page(records, ages), encoding="utf-8")


# ---- shards


def shard_of(tests: Sequence[str], seconds: dict[str, float], part: int, parts: int) -> set[str]:
    """Return the tests of one of `parts` shards (`part` counts from 1).

    Shards take about the same time. Unless a file takes too long, its tests stay together because
    they share their setup.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.split("::")[0]].append(test)
    groups: list[list[str]] = []
    for members in files.values():
        if sum(seconds.get(test, UNKNOWN_SECONDS) for test in members) > LARGE_FILE_SECONDS:
            groups += [[test] for test in members]
        else:
            groups.append(members)

    def duration(group: list[str]) -> float:
        return sum(seconds.get(test, UNKNOWN_SECONDS) for test in group)

    loads = [0.0] * parts
    shards: list[set[str]] = [set() for _ in range(parts)]
    for group in sorted(groups, key=lambda group: (-duration(group), group)):
        shortest = loads.index(min(loads))
        loads[shortest] += duration(group)
        shards[shortest].update(group)
    return shards[part - 1]


def parse_shard(text: str) -> tuple[int, int]:
    """Parse text such as `2/5` into (part, parts). Raises UsageError for anything else."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--shard {text}: expected part/parts, such as 2/5")
    return int(part), int(parts)


# ---- the plugin


class Verified:
    """A plugin that selects the tests of a `-m verify` session and records each outcome.

    With uncommitted changes, outcomes are not recorded because they could not be reproduced.
    """

    def __init__(self, shard: str | None) -> None:
        self.shard = parse_shard(shard) if shard else None
        self.recorded = read_records()
        self.changes = uncommitted()
        self.commit = git("rev-parse", "HEAD")
        self.left_out = 0
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)  # after `-m verify` has selected tests
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests in this shard that have not passed on the current code."""
        wanted = {item.nodeid for item in items}
        if self.shard:
            seconds = {test: float(record.seconds) for test, record in self.recorded.items()}
            wanted = shard_of(sorted(wanted), seconds, *self.shard)
            minutes = sum(seconds.get(test, UNKNOWN_SECONDS) for test in wanted) / 60
            if minutes > MOST_MINUTES:
                print(
                    f"This shard may take {minutes:.0f} minutes: split the tests into more parts."
                )
            passed = {test for test in wanted if self.has_passed(test)}
            self.left_out = len(passed)
            wanted -= passed
        kept = [item for item in items if item.nodeid in wanted]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = kept

    def has_passed(self, test: str) -> bool:
        """Return whether the test has passed on the current code."""
        record = self.recorded.get(test)
        return (
            record is not None
            and record.outcome == "passed"
            and not self.changes
            and not changes_since(record.commit)
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test that passed, or that failed in its setup, call or teardown."""
        if "verify" not in report.keywords or not (
            report.failed or (report.when == "call" and report.passed)
        ):
            return
        if self.outcomes.get(report.nodeid) == "failed":
            return
        self.outcomes[report.nodeid] = report.outcome
        if self.changes:
            return
        records = read_records()
        records[report.nodeid] = Record(
            test=report.nodeid,
            outcome=report.outcome,
            seconds=round(report.duration),
            commit=self.commit,
            date=time.strftime("%Y-%m-%d"),
            packages=packages(),
        )
        write_records(records.values())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the page; report which tests were skipped and whether outcomes were recorded."""
        if self.left_out:
            terminalreporter.write_line(
                f"Skipped {self.left_out} tests in this shard that have already passed on the "
                "same code."
            )
        if self.changes:
            terminalreporter.write_line(
                f"Nothing was recorded because there are uncommitted changes:\n{self.changes}"
            )
        elif self.outcomes:
            write_page()
