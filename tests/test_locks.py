"""One living process writes to a place; the kernel knows whether it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openrlhf.locks import InUseError, lock_of, locked
from tests.ranks import ROOT

HOLDER = """
import sys
from pathlib import Path
from openrlhf.locks import locked
with locked(Path(sys.argv[1]), "it", is_file=sys.argv[2] == "file") as lock:
    {then}
"""
WAIT = "print('held', flush=True); sys.stdin.read()"
LEAVE_A_CHILD = """
    import os, subprocess
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    os._exit(9)
"""

Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Start a process that locks a place, and return it when it has the lock."""
    started: list[subprocess.Popen[str]] = []

    def start(place: Path, *, is_file: bool = False, then: str = WAIT) -> subprocess.Popen[str]:
        words = [
            sys.executable,
            "-c",
            HOLDER.format(then=then),
            str(place),
            "file" if is_file else "folder",
        ]
        process = subprocess.Popen(
            words, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_a_second_process_is_refused_and_told_who_holds_the_place_until_the_first_is_killed(
    hold: Hold, tmp_path: Path, is_file: bool
) -> None:
    place = tmp_path / "a" / "place"
    holder = hold(place, is_file=is_file)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    for same in (place, link / "place", tmp_path / "a" / ".." / "a" / "place"):
        told = f"--flag x is in use by process {holder.pid} on {os.uname().nodename}"
        with pytest.raises(InUseError, match=told), locked(same, "--flag x", is_file=is_file):
            pass
    with locked(tmp_path / "a" / "other", "--flag y", is_file=is_file):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_of(place, is_file=is_file).exists(), "what a killed process leaves locks nothing"
    with locked(place, "--flag x", is_file=is_file):
        pass


def test_a_lock_lasts_as_long_as_a_child_that_has_inherited_it(hold: Hold, tmp_path: Path) -> None:
    holder = hold(tmp_path, then=LEAVE_A_CHILD)
    assert holder.stdout
    child = int(holder.stdout.readline())
    assert holder.wait() == 9
    try:
        with (
            pytest.raises(InUseError, match=f"started by process {holder.pid} "),
            locked(tmp_path, "it"),
        ):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    ready, done = os.pipe()
    with locked(tmp_path, "it"):
        child = os.fork()
        if child == 0:
            os.read(ready, 1)
            os._exit(0)
    words = [sys.executable, "-c", HOLDER.format(then="pass"), str(tmp_path), "folder"]
    status = subprocess.run(words, cwd=ROOT, check=False).returncode
    os.write(done, b"x")
    os.waitpid(child, 0)
    assert status == 0


def test_a_process_may_lock_a_place_twice_and_releases_it_with_the_outer_block(
    hold: Hold, tmp_path: Path
) -> None:
    with locked(tmp_path, "it") as outer:
        with locked(tmp_path, "it") as inner:
            assert inner == outer
        assert hold(tmp_path, then="pass").wait() != 0
    assert hold(tmp_path, then="pass").wait() == 0


def test_a_released_lock_leaves_nothing_behind_but_what_was_written(tmp_path: Path) -> None:
    with locked(tmp_path / "unused", "it"):
        assert (tmp_path / "unused").is_dir()
    assert not (tmp_path / "unused").exists()
    with locked(tmp_path / "used", "it"):
        (tmp_path / "used" / "file").touch()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    with locked(tmp_path / "empty", "it"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_a_place_that_cannot_be_locked_is_reported_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path, "it") as lock:
        assert lock is None
    assert str(tmp_path) in capsys.readouterr().err
