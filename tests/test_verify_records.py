"""Records of long-running verification tests.

Each record names a commit, outdated records are marked, and shards cover all tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import ROOT
from tests.verify.record import (
    Record,
    git,
    page,
    parse_shard,
    read_records,
    shard_of,
    write_records,
)

RECORD = Record(
    test="a.py::b",
    outcome="passed",
    seconds=3,
    commit="c" * 40,
    date="2026-01-02",
    packages="torch 2",
)


@pytest.fixture(scope="module")
def history() -> set[str]:
    """Return all commits up to HEAD."""
    if subprocess.run(["git", "rev-parse", "--git-dir"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("this checkout has no history")
    return set(git("rev-list", "HEAD").split())


def foreign(records: list[Record], history: set[str]) -> list[str]:
    """Return the tests whose record names a commit that is not in the history."""
    return [record.test for record in records if record.commit not in history]


def test_every_record_belongs_to_a_commit_in_the_history(history: set[str]) -> None:
    records = list(read_records().values())
    assert records
    assert foreign(records, history) == []


def test_every_record_names_a_test_that_exists() -> None:
    for name in read_records():
        path, _, test = name.partition("::")
        function = test.partition("[")[0]
        assert (ROOT / path).exists(), name
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_record_of_unknown_commit_or_uncommitted_changes_is_detected(history: set[str]) -> None:
    head = git("rev-parse", "HEAD")
    assert foreign([replace(RECORD, commit=head)], history) == []
    assert foreign([RECORD, replace(RECORD, commit=head + "+")], history) == [RECORD.test] * 2


def test_golden_numbers_belong_to_commits_in_the_history(history: set[str]) -> None:
    for file in sorted((ROOT / "tests/goldens").glob("*/*.json")):
        assert json.loads(file.read_text(encoding="utf-8"))["commit"] in history, file


def test_records_round_trip_through_file(tmp_path: Path) -> None:
    other = replace(RECORD, test="a.py::a", outcome="failed")
    write_records([RECORD, other], tmp_path / "records.jsonl")
    assert read_records(tmp_path / "records.jsonl") == {RECORD.test: RECORD, other.test: other}


def test_page_header_names_oldest_record() -> None:
    new = replace(RECORD, test="new", date="2026-03-01", commit="d" * 40)
    lines = page([new, RECORD], {"c" * 40: 17, "d" * 40: 0}).splitlines()
    assert RECORD.date in lines[2] and "ccccccc" in lines[2] and "17" in lines[2]
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("|")[1].strip() for row in rows] == ["`a.py::b`", "`new`"]


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), min_size=1, max_size=60),
)
def test_shards_cover_every_test_once(parts: int, spread: list[tuple[int, int]]) -> None:
    seconds = {
        f"file{file}.py::test{number}": float(time) for number, (file, time) in enumerate(spread)
    }
    shards = [shard_of(sorted(seconds), seconds, part, parts) for part in range(1, parts + 1)]
    assert sorted(test for shard in shards for test in shard) == sorted(seconds)


def test_shards_of_recorded_tests_have_similar_durations() -> None:
    seconds = {test: float(record.seconds) for test, record in read_records().items()}
    loads = [
        sum(seconds[test] for test in shard_of(sorted(seconds), seconds, part, 5))
        for part in range(1, 6)
    ]
    assert max(loads) < 1.2 * min(loads)


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "a/b", "1/3/5"])
def test_invalid_shard_is_rejected(text: str) -> None:
    with pytest.raises(pytest.UsageError):
        parse_shard(text)


SESSION = """
import pytest
pytestmark = pytest.mark.verify
def test_one(): pass
def test_two(): assert not {fails}
"""


def run_session(folder: Path, *, fails: bool) -> str:
    """Run `-m verify` on two tests in a separate repository, and return pytest's output."""
    (folder / "tests/test_small.py").write_text(SESSION.format(fails=fails), encoding="utf-8")
    for command in (
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    program = (
        "import sys, pathlib, pytest\n"
        "import tests.verify.record as record\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "record.ROOT, record.RECORDS, record.PAGE = folder, folder / 'r.jsonl', folder / 'r.md'\n"
        "record.read_records.__defaults__ = record.write_records.__defaults__ = "
        "(folder / 'r.jsonl',)\n"
        "pytest.main(['-q', '-m', 'verify', '-p', 'no:cacheprovider', '-c', '/dev/null', "
        "'--rootdir', str(folder),\n"
        "  str(folder / 'tests')], plugins=[record.Verified('1/1')])\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_restarted_shard_runs_only_tests_that_have_not_passed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = run_session(tmp_path, fails=True)
    assert "1 failed, 1 passed" in first
    records = read_records(tmp_path / "r.jsonl")
    assert sorted(record.outcome for record in records.values()) == ["failed", "passed"]
    assert (tmp_path / "r.md").exists()
    again = run_session(tmp_path, fails=True)  # an empty commit, so the code is the same
    assert "1 failed" in again and "passed" not in again.splitlines()[-2]
    other = run_session(tmp_path, fails=False)  # the code differs, so every test must run again
    assert "2 passed" in other
