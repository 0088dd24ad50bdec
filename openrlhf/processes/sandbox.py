"""Runs a Python program that a model wrote: in a folder of its own, without network, within limits and a deadline.

A program is the child of a launcher, a process that keeps the deadline and kills all that the program leaves behind. Both
are gone when `run_program` returns, or at the program's deadline if the caller is killed. `confinement` confines the
program. Standard library only.
"""

import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from openrlhf.processes import confinement

MEMORY_BYTES = 2 << 30  # address space of each process
FILE_BYTES = 16 << 20  # of each file, the output among them
PROCESSES, OPEN_FILES = 32, 128
SPARE_SECONDS = 30  # for the launcher, beyond the program's own deadline
OK, FAILED, LATE = 0, 100, 101  # how a launcher ends; anything else is a defect of ours
LAUNCH = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from openrlhf.processes.sandbox import launch"
)
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Interpreter and libraries. Datasets and their answers are elsewhere.
READABLE = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime",
            "/dev/zero", "/dev/urandom", "/sys/devices/system/cpu"]  # fmt: skip


class SandboxError(RuntimeError):
    """The sandbox itself did not work: nothing is known about the program."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a program ended. `output` is what it wrote to standard output, `errors` the end of standard error."""

    ok: bool  # exit status 0 in time
    late: bool  # it ran out of time
    output: str
    errors: str


def run_program(program: str, stdin: str = "", *, seconds: float) -> Ran:
    """Run `program` with this standard input; it has `seconds` of CPU time, and twice that by the clock.

    Raises SandboxError if it cannot be started.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,  # the launcher removes it
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        uid = random.choice(confinement.UIDS)  # used by root
        try:
            status = subprocess.run(
                [sys.executable, "-I", "-S", "-c", f"{LAUNCH}; launch({seconds!r}, {uid}, {READABLE!r})"],
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
            raise SandboxError(f"the sandbox did not end {SPARE_SECONDS} s after its program's deadline") from error
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        said = errors.read().decode(errors="replace")
        if status not in (OK, FAILED, LATE):
            raise SandboxError(f"the sandbox does not work here:\n{said}")
        output.seek(0)
        return Ran(ok=status == OK, late=status == LATE, output=output.read().decode(errors="replace"), errors=said)


def missing_protection() -> list[str]:
    """What the sandbox cannot do on this machine, in words; an empty list if all of it works."""
    probe = run_program("import os\nprint(os.environ['UNPROTECTED'])", seconds=20)
    if not probe.ok:
        raise SandboxError(f"the sandbox does not work here:\n{probe.errors}")
    return list(json.loads(probe.output))


def launch(seconds: float, uid: int, readable: list[str]) -> NoReturn:
    """The launcher: start ./program.py as a confined child, wait, remove all that is left of it, report how it ended."""
    unprotected: list[str] = []
    with suppress(OSError):
        os.chown(".", uid, -1)
    if not confinement.limit_processes(PROCESSES, uid):
        unprotected.append("processes are limited by the account's own limit only")
    confinement.adopt_orphans()
    child = subprocess.Popen(
        [sys.executable, "-I", "program.py"],
        start_new_session=True,
        preexec_fn=lambda: _confine(seconds, readable, unprotected),
    )
    on_time = select.select([os.pidfd_open(child.pid)], [], [], 2 * seconds)[0]
    status = confinement.end_all(child.pid)
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    late = not on_time or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    os._exit(LATE if late else FAILED if status else OK)


def _confine(seconds: float, readable: list[str], unprotected: list[str]) -> None:
    """Give away, in this process, what a program need not have; tell its environment what cannot be given away, in words."""
    cpu = max(1, round(seconds))
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        confinement.limit(kind, value)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # a signal that tells, then one that ends
    # The interpreter may be in a folder that only root reads.
    kept = {confinement.CAP_DAC_OVERRIDE, confinement.CAP_DAC_READ_SEARCH} & confinement.capabilities()
    try:
        confinement.restrict_files(read=readable, write=os.getcwd())
    except OSError as error:
        kept = set()
        unprotected.append(f"files that this account may read or write are not out of reach (no Landlock: {error})")
    confinement.keep_capabilities(kept)
    try:
        confinement.deny_calls()
    except OSError as error:
        unprotected.append(f"there is a network, and other processes can be signalled (no seccomp: {error})")
    os.environ["UNPROTECTED"] = json.dumps(unprotected)
