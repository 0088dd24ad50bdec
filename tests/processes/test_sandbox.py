"""The sandbox: a program may do what it likes in its own folder, for a while, and nothing outside."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path

import pytest

from openrlhf.processes import sandbox
from openrlhf.processes.pool import ProcessPool
from openrlhf.processes.sandbox import Ran, SandboxError, missing_protection, run_program

SECONDS = 5.0  # far more than any of these programs needs


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes of other tests are elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("sandboxes")))


def processes(mark: str) -> list[str]:
    """Command lines and environments in which a text occurs."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        found += [entry.name] if mark.encode() in text and int(entry.name) != os.getpid() else []
    return found


def run(program: str, stdin: str = "", seconds: float = SECONDS) -> Ran:
    before = set(Path(tempfile.gettempdir()).glob("sandbox-*"))
    ran = run_program(program, stdin, seconds=seconds)
    assert set(Path(tempfile.gettempdir()).glob("sandbox-*")) <= before, "it cleans up"
    return ran


def test_a_program_reads_its_input_and_its_output_is_kept() -> None:
    ran = run("print(sum(map(int, input().split())))", "3 4\n")
    assert (ran.ok, ran.late, ran.output, ran.errors) == (True, False, "7\n", "")


def test_it_may_use_its_folder_its_libraries_threads_and_processes() -> None:
    program = """
import asyncio, multiprocessing, numpy, subprocess, threading
open("a.txt", "w").write("kept")
thread = threading.Thread(target=print, args=(open("a.txt").read(),))
thread.start(); thread.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout, end="", flush=True)
asyncio.run(asyncio.sleep(0))
print(numpy.arange(3).sum())
"""
    ran = run(program)
    assert (ran.ok, ran.output) == (True, "kept\nchild\n3\n"), ran.errors


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(3)", ""),
        ("input()", "EOFError"),
        ("bytearray(1 << 36)", "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", "PermissionError"),
        ("while True: print('x' * 1_000_000)", "File too large"),
        ("open('big', 'wb').truncate(1 << 40)", "File too large"),
        ("[open(f'{i}', 'w') for i in range(1000)].clear(); x = [open(f'{i}') for i in range(1000)]", "Too many open files"),
        ("import ctypes; ctypes.string_at(0)", ""),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_it_is_its_own_failure(program: str, said: str) -> None:
    ran = run(program)
    assert not ran.ok and not ran.late
    assert said in ran.errors
    assert len(ran.output) <= sandbox.FILE_BYTES and len(ran.errors) <= 2000


def test_a_program_that_sleeps_or_computes_for_too_long_is_late() -> None:
    assert run("import time; print('here', flush=True); time.sleep(1000)", seconds=0.5) == Ran(
        ok=False, late=True, output="here\n", errors=""
    )
    assert run("while True: pass", seconds=1) == Ran(ok=False, late=True, output="", errors="")


def test_nothing_is_left_of_a_fork_bomb_that_leaves_its_session() -> None:
    """Bounded by itself as well: copies that find no room sleep, and all of them end."""
    mark = secrets.token_hex(8)
    bomb = f"""
import os, sys, time
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, "-I", "program.py", {mark!r}])
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError as error:
        os.write(1, f"{{error.strerror}}\\n".encode())
        time.sleep(30)
"""
    ran = run(bomb, seconds=0.75)
    assert ran.late and "Resource temporarily unavailable" in ran.output
    assert processes(mark) == []


def test_no_daemon_outlives_its_program() -> None:
    mark = secrets.token_hex(8)
    program = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", {mark!r}], start_new_session=True)
print("started")
"""
    ran = run(program)
    assert (ran.ok, ran.output) == (True, "started\n"), ran.errors
    assert processes(mark) == []


needs_everything = pytest.mark.skipif(bool(missing_protection()), reason=f"not on this machine: {missing_protection()}")


@needs_everything
@pytest.mark.parametrize(
    "reach",
    [
        "open({outside!r}, 'w')",
        "open({outside!r})",
        "__import__('os').remove({outside!r})",
        "__import__('os').listdir({folder!r})",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "__import__('socket').socket()",
        "__import__('socket').create_connection(('127.0.0.1', 22))",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os').kill(-1, 9)",
    ],
)
def test_files_elsewhere_the_network_and_other_processes_are_out_of_reach(tmp_path: Path, reach: str) -> None:
    outside = tmp_path / "answers.json"
    outside.write_text("42")
    ran = run(reach.format(outside=str(outside), folder=str(tmp_path)))
    assert not ran.ok
    assert "PermissionError" in ran.errors
    assert outside.read_text() == "42"


@needs_everything
def test_it_works_in_a_host_too_which_is_confined_itself(tmp_path: Path) -> None:
    program = "import os; print(input(), os.environ['UNPROTECTED'], len(os.environ) < 12)"
    file = tmp_path / "reward.py"
    file.write_text(
        "from openrlhf.utils import run_program\n"
        f"def run():\n    return run_program({program!r}, 'nested', seconds={SECONDS}).output\n"
    )
    with ProcessPool(1) as pool:
        assert asyncio.run(pool.call(f"{file}:run", timeout=30)) == "nested [] True\n"


def test_a_sandbox_that_does_not_work_is_an_error_and_no_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "READABLE", ["/usr"])  # no interpreter in sight
    monkeypatch.setattr(sandbox, "LAUNCH", sandbox.LAUNCH + "; raise OSError('no more memory')")
    with pytest.raises(SandboxError, match="no more memory"):
        run_program("print(1)", seconds=SECONDS)
