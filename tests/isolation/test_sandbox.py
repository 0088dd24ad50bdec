"""Tests that a sandboxed program can act only inside its folder and for a limited time."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from openrlhf.isolation import sandbox
from openrlhf.isolation.pool import ProcessPool, UserCodeError
from openrlhf.isolation.sandbox import Ran, SandboxError, missing_protection, run_program

SECONDS = 5.0  # far longer than any of these programs needs


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate folder for the sandboxes of each test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("sandboxes")))


def processes(mark: str) -> list[str]:
    """Return the ids of other processes whose command line or environment contains `mark`."""
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
    deadline = time.monotonic() + 60
    while not set(Path(tempfile.gettempdir()).glob("sandbox-*")) <= before:
        assert time.monotonic() < deadline, "the program's folder was not removed"
        time.sleep(0.01)
    return ran


def test_program_reads_stdin_and_its_output_is_captured() -> None:
    ran = run("print(sum(map(int, input().split())))", "3 4\n")
    assert (ran.ok, ran.late, ran.output, ran.errors) == (True, False, "7\n", "")


def test_program_may_use_its_folder_libraries_threads_and_subprocesses() -> None:
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
        ("[open(f'{i}', 'w') for i in range(1000)].clear(); x = "
         "[open(f'{i}') for i in range(1000)]", "Too many open files"),
        ("import ctypes; ctypes.string_at(0)", ""),
    ],
)  # fmt: skip
def test_error_in_a_program_is_reported_as_its_failure(program: str, said: str) -> None:
    ran = run(program)
    assert not ran.ok and not ran.late
    assert said in ran.errors
    assert len(ran.output) <= sandbox.FILE_BYTES and len(ran.errors) <= 2000


def test_program_that_sleeps_or_computes_for_too_long_times_out() -> None:
    assert run("import time; print('here', flush=True); time.sleep(1000)", seconds=0.5) == Ran(
        ok=False, late=True, output="here\n", errors=""
    )
    assert run("while True: pass", seconds=1) == Ran(ok=False, late=True, output="", errors="")


def test_fork_bomb_that_leaves_its_session_is_fully_killed() -> None:
    """The fork bomb also limits itself: a copy that cannot fork sleeps, and every copy exits."""
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


def test_daemon_does_not_outlive_its_program() -> None:
    mark = secrets.token_hex(8)
    program = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", {mark!r}], start_new_session=True)
print("started")
"""  # noqa: E501
    ran = run(program)
    assert (ran.ok, ran.output) == (True, "started\n"), ran.errors
    assert processes(mark) == []


needs_everything = pytest.mark.skipif(
    bool(missing_protection()), reason=f"this machine lacks: {missing_protection()}"
)


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
def test_program_cannot_reach_other_files_the_network_or_other_processes(
    tmp_path: Path, reach: str
) -> None:
    outside = tmp_path / "answers.json"
    outside.write_text("42")
    ran = run(reach.format(outside=str(outside), folder=str(tmp_path)))
    assert not ran.ok
    assert "PermissionError" in ran.errors
    assert outside.read_text() == "42"


# Each program tries to attack the process or the file given by its first two arguments.
# The user who runs the sandbox owns both the process and the file.
ESCAPES = {
    "signal on input": """
import fcntl, os, signal, socket
near, far = socket.socketpair()
fcntl.fcntl(near, fcntl.F_SETOWN, process)
fcntl.fcntl(near, 10, signal.SIGKILL)
fcntl.fcntl(near, fcntl.F_SETFL, os.O_ASYNC)
far.send(b"x")
""",
    "signal on input, by ioctl": """
import array, fcntl, socket
near, far = socket.socketpair()
fcntl.ioctl(near, 0x8901, array.array("i", [process]))
fcntl.ioctl(near, 0x5452, array.array("i", [1]))
far.send(b"x")
""",
    "asynchronous input": """
import fcntl, os, socket
near, far = socket.socketpair()
fcntl.fcntl(near, fcntl.F_SETFL, os.O_NONBLOCK)
fcntl.fcntl(near, fcntl.F_SETFL, os.O_ASYNC)
""",
    "limits": "import resource; resource.prlimit(process, resource.RLIMIT_CPU, (1, 1))",
    "limits, read": "import resource; resource.prlimit(process, resource.RLIMIT_CPU)",
    "priority": "os.setpriority(os.PRIO_PROCESS, process, 19)",
    "processor": "os.sched_setaffinity(process, {0})",
    "scheduler": "os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))",
    "handle of a process": "os.pidfd_open(process)",
    "signal": "os.kill(process, 9)",
    "signal to a thread": (
        "import ctypes; call(ctypes.CDLL(None, use_errno=True).syscall(200, process, 9))"
    ),
    "trace": (
        "import ctypes; call(ctypes.CDLL(None, use_errno=True).ptrace(16, process, None, None))"
    ),
    "permissions": "os.chmod(file, 0o777)",
    "permissions of a folder": "os.chmod(os.path.dirname(file), 0)",
    "permissions of an open library": "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777)",
    "owner": "os.chown(file, os.getuid(), os.getgid())",
    "times": "os.utime(file, (0, 0))",
    "attribute": "os.setxattr(file, 'user.mark', b'x')",
    "length": "os.truncate(file, 0)",
    "length of a library": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "datagrams": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "namespace": "import ctypes; call(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))",
    "io_uring": "import ctypes; call(ctypes.CDLL(None, use_errno=True).syscall(425, 1, None))",
    "shared memory": (
        "import ctypes; call(ctypes.CDLL(None, use_errno=True).shmget(1, 4096, 0o1600))"
    ),
}
# This script runs as the sandbox's user and prints the escapes that succeeded.
# The script also prints whether the process and the file are unchanged.
TRY_ESCAPES = """
import json, os, pathlib, subprocess, sys, tempfile
from openrlhf.isolation.sandbox import run_program

escapes, begin = json.load(sys.stdin)
tempfile.tempdir = sys.argv[1]
file = pathlib.Path(tempfile.mkdtemp(), "answers.json")
file.write_text("42")
process = subprocess.Popen(["sleep", "600"])
before = (os.stat(file), os.stat(file.parent).st_mode, os.sched_getaffinity(process.pid))
escaped = []
for name, program in escapes.items():
    ran = run_program(begin + program, f"{process.pid} {file}", seconds=5)
    if ran.ok or "Error" not in ran.errors:
        escaped.append((name, ran.errors))
after = (os.stat(file), os.stat(file.parent).st_mode, os.sched_getaffinity(process.pid))
same = before == after and process.poll() is None and os.getpriority(os.PRIO_PROCESS, process.pid) == os.nice(0)
process.kill()
process.wait()
print(json.dumps([escaped, same]))
"""  # noqa: E501
BEGIN = """
import os
process, file = input().split()
process = int(process)
def call(result):
    if result < 0:
        raise OSError
"""


@needs_everything
@pytest.mark.parametrize("user", ["the tester", "an ordinary user"])
def test_escape_attempts_reach_no_process_or_file_of_the_same_user(user: str) -> None:
    uid, interpreter = os.getuid(), sys.executable
    if user == "an ordinary user":
        interpreter = shutil.which("python3", path="/usr/bin")  # readable by every user
        if uid != 0 or interpreter is None:
            pytest.skip(
                "needs root, to become an ordinary user, and the system's Python interpreter"
            )
        uid = 65534
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        ended = subprocess.run(
            [interpreter, "-c", TRY_ESCAPES, folder],
            input=json.dumps([ESCAPES, BEGIN]),
            capture_output=True,
            text=True,
            user=uid,
            env=os.environ | {"PYTHONPATH": str(Path(sandbox.__file__).parents[2])},
            timeout=300,
            check=False,
        )
    if user == "an ordinary user" and "ImportError" in ended.stderr:
        pytest.skip("the system's Python interpreter is too old for the package")
    if user == "an ordinary user" and "ModuleNotFoundError" in ended.stderr:
        pytest.skip("an ordinary user cannot read the package here")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[], True]


@pytest.mark.parametrize(
    "program",
    [
        "for number in range(10**9): os.mkdir(str(number))",
        "while True: os.mkdir('inside'); os.chdir('inside')",
        "for number in range(10**9): open(str(number), 'w').close()",
        "for number in range(60): open(str(number), 'wb').write(bytes(10 << 20))",
    ],
)
def test_program_that_fills_its_folder_fails_at_once_and_leaves_nothing_behind(
    program: str,
) -> None:
    ran = run("import os, time\n" + program, seconds=30)
    assert not ran.ok and not ran.late


def test_folder_of_any_depth_is_removed_regardless_of_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox"
    folder.mkdir()
    deepest = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("inside", dir_fd=deepest)
        os.symlink(tmp_path, "outside", dir_fd=deepest)
        below = os.open("inside", os.O_RDONLY, dir_fd=deepest)
        os.close(deepest)
        deepest = below
    os.close(deepest)
    (folder / "closed").mkdir(mode=0)
    sandbox.remove_folder(str(folder))
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_everything
def test_sandbox_works_inside_a_confined_user_process(tmp_path: Path) -> None:
    program = "import os; print(input(), os.environ['UNPROTECTED'], len(os.environ) < 12)"
    file = tmp_path / "reward.py"
    file.write_text(
        "from openrlhf.utils import run_program\n"
        f"def run():\n    return run_program({program!r}, 'nested', seconds={SECONDS}).output\n"
    )
    with closing(ProcessPool(1)) as pool:
        assert asyncio.run(pool.call(f"{file}:run", timeout=30)) == "nested [] True\n"


def test_killed_user_process_leaves_no_folder_of_its_programs_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "slow.py"
    file.write_text(
        "from openrlhf.isolation.sandbox import run_program\n"
        "def run():\n    run_program('import time; time.sleep(99)', seconds=40)\n"
    )
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    with closing(ProcessPool(1)) as pool, pytest.raises(UserCodeError, match="more than 3 s"):
        asyncio.run(pool.call(f"{file}:run", timeout=3))
    deadline = time.monotonic() + 30
    while list(folders.glob("sandbox-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(folders.glob("sandbox-*"))


def test_broken_sandbox_raises_an_error_instead_of_failing_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "READABLE", ["/usr"])  # no Python interpreter in the sandbox
    monkeypatch.setattr(sandbox, "LAUNCH", sandbox.LAUNCH + "; raise OSError('no more memory')")
    with pytest.raises(SandboxError, match="no more memory"):
        run_program("print(1)", seconds=SECONDS)


def test_launcher_that_cannot_start_leaves_no_folder_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/interpreter")
    with pytest.raises(OSError, match="interpreter"):
        run_program("print(1)", seconds=SECONDS)
    assert not list(tmp_path.iterdir())


def test_sandbox_that_outlives_its_deadline_is_reported_as_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "SPARE_SECONDS", 0)
    with pytest.raises(sandbox.SandboxError, match="still running"):
        sandbox.run_program("", seconds=1e-4)
