"""A sandbox for Python programs written by a model.

A program runs in a temporary folder, without network access, with resource limits and a deadline.
The program is the child of a launcher process that enforces the deadline and kills all remaining
processes of the program. The launcher and the program have ended when `run_program` returns or, if
the caller is killed, at the program's deadline. If the caller is a user process, its programs are
killed with it, and their folders are removed. The program is restricted by `confinement`. This
module needs only the standard library.
"""

import json
import os
import random
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from openrlhf.isolation import confinement

MEMORY_BYTES = 2 << 30  # limit on the address space of each process
FILE_BYTES = 16 << 20  # maximum size of each file, including the captured output
PROCESSES, OPEN_FILES = 32, 128
FOLDER_ENTRIES, FOLDER_BYTES = 4096, 256 << 20  # limits on the contents of a program's folder
LOOK_SECONDS = 0.05  # interval between checks of the folder
SPARE_SECONDS = 30  # extra time for the launcher after the program's deadline
OK, FAILED, LATE = 0, 100, 101  # exit statuses of a launcher; any other status is a bug
LAUNCH = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from openrlhf.isolation.sandbox import launch"
)
PREFIX = "sandbox-"  # of the names of programs' folders
OWNER = "OPENRLHF_SANDBOX_OWNER"  # environment variable that a user process appends to PREFIX
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Folders with the interpreter and libraries. A program cannot read datasets and their answers.
READABLE = [
    sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache",
    "/etc/localtime", "/dev/zero", "/dev/urandom", "/sys/devices/system/cpu",
]  # fmt: skip


class SandboxError(RuntimeError):
    """A failure of the sandbox itself; the outcome of the program is unknown."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The outcome of a program."""

    ok: bool  # True if the program exited with status 0 before its deadline
    late: bool  # it timed out
    output: str  # its standard output
    errors: str  # the last 2000 bytes of the program's stderr


def run_program(program: str, stdin: str = "", *, seconds: float) -> Ran:
    """Run `program` with `stdin` as its standard input.

    The program may use `seconds` of CPU time and twice as much wall-clock time. Raises SandboxError
    if the program cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        folder = tempfile.mkdtemp(prefix=PREFIX + os.environ.get(OWNER, ""))
        try:
            status = _launch_in(folder, program, stdin, seconds, output, errors)
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
            said = errors.read().decode(errors="replace")
            if status not in (OK, FAILED, LATE):
                raise SandboxError(f"the sandbox failed on this machine (status {status}):\n{said}")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # otherwise, the launcher removes the folder
            raise
        output.seek(0)
        return Ran(
            ok=status == OK,
            late=status == LATE,
            output=output.read().decode(errors="replace"),
            errors=said,
        )


def _launch_in(
    folder: str, program: str, stdin: str, seconds: float, output: IO[bytes], errors: IO[bytes]
) -> int:
    """Run a launcher in a folder and return its exit status."""
    Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
    uid = random.choice(confinement.UIDS)  # user id of the program if this process runs as root
    try:
        return subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                f"{LAUNCH}; launch({seconds!r}, {uid}, {READABLE!r})",
            ],
            input=stdin.encode(errors="replace"),
            stdout=output,
            stderr=errors,
            cwd=folder,
            env=ENVIRONMENT | {"HOME": folder},
            start_new_session=True,
            timeout=2 * seconds + SPARE_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise SandboxError(
            f"the sandbox was still running {SPARE_SECONDS} s after its program's deadline"
        ) from error


def missing_protection() -> list[str]:
    """Return a description of each protection that this machine does not support."""
    probe = run_program("import os\nprint(os.environ['UNPROTECTED'])", seconds=20)
    if not probe.ok:
        raise SandboxError(f"the sandbox failed on this machine:\n{probe.errors}")
    return list(json.loads(probe.output))


def launch(seconds: float, uid: int, readable: list[str]) -> NoReturn:
    """Run ./program.py as a confined child, clean up after it, and exit with its outcome.

    This is the launcher's main function. The exit status is OK, FAILED or LATE.
    """
    unprotected: list[str] = []
    with suppress(OSError):
        os.chown(".", uid, -1)
    if not confinement.limit_processes(PROCESSES, uid):
        unprotected.append("only the account's own limit restricts the number of processes")
    confinement.adopt_orphans()
    child = subprocess.Popen(
        [sys.executable, "-I", "program.py"],
        start_new_session=True,
        preexec_fn=lambda: _confine(seconds, readable, unprotected),
    )
    ending = _wait(child.pid, 2 * seconds)
    status = os.waitstatus_to_exitcode(confinement.end_all(child.pid))
    if ending == OK and status == -signal.SIGXCPU:
        ending = LATE
    elif ending == OK and status:
        ending = FAILED
    remove_folder(os.getcwd())
    os._exit(ending)


def _wait(child: int, seconds: float) -> int:
    """Wait until a program ends, fills its folder or times out. Returns OK, FAILED or LATE."""
    deadline = time.monotonic() + seconds
    ended = os.pidfd_open(child)
    while (left := deadline - time.monotonic()) > 0:
        if select.select([ended], [], [], min(left, LOOK_SECONDS))[0]:
            return OK
        if is_too_full("."):
            limits = f"{FOLDER_ENTRIES:,} files and folders or {FOLDER_BYTES >> 20} MiB"
            os.write(2, f"The program's folder contains more than {limits}.\n".encode())
            return FAILED
    return LATE


def is_too_full(folder: str) -> bool:
    """Return True if a program's folder exceeds its limits or cannot be read."""
    entries, size = 0, 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    status = entry.stat(follow_symlinks=False)
                    entries += 1
                    size += 512 * status.st_blocks
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
                    if entries > FOLDER_ENTRIES or size > FOLDER_BYTES:
                        return True
        except (FileNotFoundError, NotADirectoryError):  # removed in the meantime
            continue
        except OSError:  # e.g. the path is too long
            return True
    return False


def remove_folder(folder: str) -> None:
    """Remove a folder of any depth, regardless of its permissions, in the background."""
    command = 'chmod -R u+rwx "$0"; rm -rf "$0"'
    with suppress(OSError):  # no process can be started
        subprocess.Popen(["sh", "-c", command, folder], stderr=subprocess.DEVNULL)


def remove_folders_of(owner: str) -> None:
    """Remove the folders of programs whose launchers were killed together with their caller."""
    with suppress(OSError):  # there is no usable temporary directory, e.g. on a full disk
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{owner}*"):
            remove_folder(str(folder))


def _confine(seconds: float, readable: list[str], unprotected: list[str]) -> None:
    """Drop the rights that a program does not need.

    The environment variable UNPROTECTED describes, as JSON, the rights that cannot be dropped.
    """
    cpu = max(1, round(seconds))
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        confinement.limit(kind, value)
    # The soft limit sends SIGXCPU, which the launcher recognizes; the hard limit sends SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    # The interpreter may be in a folder that only root can read.
    kept = {
        confinement.CAP_DAC_OVERRIDE,
        confinement.CAP_DAC_READ_SEARCH,
    } & confinement.capabilities()
    try:
        confinement.restrict_files(read=readable, write=os.getcwd())
    except OSError as error:
        kept = set()
        unprotected.append(
            f"the program can access all files of this account (no Landlock: {error})"
        )
    confinement.keep_capabilities(kept)
    try:
        confinement.restrict_calls()
    except OSError as error:
        unprotected.append(
            f"system calls are not filtered ({error}), so a program can change permissions, owners "
            "and times of this account's files, limit or slow down its other processes, and use "
            "the network, which Landlock restricts only for TCP from version 4. Before version "
            "6, a program can also send signals; before version 3, it can also truncate the "
            "interpreter's files"
        )
    os.environ["UNPROTECTED"] = json.dumps(unprotected)
