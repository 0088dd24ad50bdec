"""Tests for locks on folders and files, which the kernel releases when the holder exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openrlhf.locks import InUseError, check_unlocked, lock_of, locked
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
    """Return a function that locks a path in a new process."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, *, is_file: bool = False, then: str = WAIT) -> subprocess.Popen[str]:
        words = [
            sys.executable,
            "-c",
            HOLDER.format(then=then),
            str(path),
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
def test_lock_error_names_holder_until_holder_is_killed(
    hold: Hold, tmp_path: Path, is_file: bool
) -> None:
    path = tmp_path / "a" / "locked"
    holder = hold(path, is_file=is_file)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    for same in (path, link / "locked", tmp_path / "a" / ".." / "a" / "locked"):
        named = rf"--flag x .*process {holder.pid} on {os.uname().nodename}"
        with pytest.raises(InUseError, match=named), locked(same, "--flag x", is_file=is_file):
            pass
        with pytest.raises(InUseError, match=named):
            check_unlocked(same, "--flag x", is_file=is_file)
    with locked(tmp_path / "a" / "other", "--flag y", is_file=is_file):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_of(path, is_file=is_file).exists(), (
        "the file of a killed process must not lock the path"
    )
    check_unlocked(path, "--flag x", is_file=is_file)
    with locked(path, "--flag x", is_file=is_file):
        check_unlocked(path, "--flag x", is_file=is_file)  # this process holds the lock


def test_check_unlocked_creates_no_file_and_keeps_no_lock(hold: Hold, tmp_path: Path) -> None:
    check_unlocked(tmp_path / "missing", "it")
    assert not (tmp_path / "missing").exists()
    lock_of(tmp_path).touch()  # like a lock file left behind by a killed process
    check_unlocked(tmp_path, "it")
    assert hold(tmp_path, then="pass").wait() == 0


def test_lock_is_held_while_a_child_that_inherited_it_runs(hold: Hold, tmp_path: Path) -> None:
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


def test_forked_child_does_not_hold_lock(tmp_path: Path) -> None:
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


def test_path_locked_twice_is_released_by_outer_block(hold: Hold, tmp_path: Path) -> None:
    with locked(tmp_path, "it") as outer:
        with locked(tmp_path, "it") as inner:
            assert inner == outer
        assert hold(tmp_path, then="pass").wait() != 0
    assert hold(tmp_path, then="pass").wait() == 0


def test_released_lock_removes_its_file_and_the_empty_folder_it_created(tmp_path: Path) -> None:
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


def test_path_that_cannot_be_locked_prints_notice_and_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path, "it") as lock:
        assert lock is None
    assert str(tmp_path) in capsys.readouterr().err
