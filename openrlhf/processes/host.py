"""One host: a killable process for the user's code, the socket to it, and what its end looked like.

Of a host that hangs, exits, crashes or fills its memory, and of all that it started, nothing is left. `hosts` has those that
run one call at a time, `agents.pool` those that run many episodes at once.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.processes.confinement import UIDS
from openrlhf.processes.host_process import DUMP_SIGNAL, LENGTH
from openrlhf.trajectory import Failure

MAX_REPLY_BYTES = 1 << 28
DUMP_SECONDS = 0.5  # what a call that ran out of time gets for writing down where it hangs
ROUNDS = 100  # of looking for what a host left behind
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


class HostError(RuntimeError):
    """The function raised, or returned what cannot leave a host; the message has the traceback."""

    def __init__(self, message: str, failure: Failure = Failure.EXCEPTION) -> None:
        super().__init__(message)
        self.failure = failure


class HostLoadError(HostError):
    """The file or the function cannot be loaded; the message has the traceback."""


class HostTimeout(HostError):
    """The call, or the loading before it, took too long; its host was killed."""


class HostDied(HostError):
    """The host ended during the call: an exit, a crash, a kill."""


def frame(**request: Any) -> bytes:
    """A request as it goes to a host."""
    data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def host_environment() -> dict[str, str]:
    """The environment of hosts: ours, and our import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # Of what a host of root is then, another user, the password file knows nothing.
    names = {"USER": "root", "HOME": os.path.expanduser("~")} if os.geteuid() == 0 else {}
    return {**names, **os.environ, **ENVIRONMENT, "PYTHONPATH": path}


class HostProcess:
    """One host process and the socket to it; restarted in place. `program` is the module it runs."""

    def __init__(self, program: str, memory_bytes: int, log: Path | None) -> None:
        self.program, self.memory_bytes, self.log = program, memory_bytes, log
        self.environment = host_environment()
        self.ending: list[threading.Thread] = []  # of earlier processes

    def start(self) -> None:
        """Start the process, in a session of its own."""
        self.mark = f"OPENRLHF_HOST={secrets.token_hex(8)}"  # in the environment of all it starts
        self.uid = random.choice(UIDS)  # of the processes, where we are root
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        their_end, our_end = os.pipe()
        self.lifeline = os.fdopen(our_end, "wb", buffering=0)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        output = os.dup(2) if self.log is None else os.open(self.log, flags, 0o644)
        arguments = (theirs.fileno(), their_end, self.memory_bytes, self.uid)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.program, *map(str, arguments)],
                pass_fds=(theirs.fileno(), their_end),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, **dict([self.mark.split("=")])},
            )
        finally:
            theirs.close()
            os.close(their_end)
            os.close(output)

    def cut(self) -> None:
        """Kill the process group and end the wait for a reply, unless one has arrived already."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Kill the process group, close the files, and aside kill what left the group and reap the process."""
        self.cut()
        self.socket.close()
        self.lifeline.close()
        self.ending = [thread for thread in self.ending if thread.is_alive()]
        self.ending.append(threading.Thread(target=_end, args=(self.process, self.uid, self.mark)))
        self.ending[-1].start()

    def buried(self) -> None:
        """Wait until nothing is left of this process and the ones before it."""
        _end(self.process, self.uid, self.mark)
        for thread in self.ending:
            thread.join()

    def dump(self) -> None:
        """Have the process write to its log where it is."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, DUMP_SIGNAL)

    async def loss(self, activity: str, seconds: float, log_start: int, *, expired: bool) -> HostError:
        """Of a host that is gone, during `activity` with a limit of `seconds`: how it ended, and what it wrote.

        That is the end of its log since byte `log_start`. `expired`: the limit was exceeded, and we ended it.
        """
        self.cut()
        code = await asyncio.to_thread(self.process.wait)
        log = self._printed(log_start)
        if expired or code == -DUMP_SIGNAL:  # which ends a host that is still starting
            return HostTimeout(f"{activity} took more than {seconds:g} s.{log}", Failure.TIMEOUT)
        failure = Failure.EXIT if code >= 0 else Failure.KILLED
        return HostDied(f"{activity} ended its host: {_ending(code)}.{log}", failure)

    @property
    def log_size(self) -> int:
        """Bytes in the log so far."""
        return self.log.stat().st_size if self.log and self.log.exists() else 0

    def _printed(self, start: int) -> str:
        """The end of what the host logged since byte `start`: where it hung or crashed."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(max(start, self.log.stat().st_size - 4000))
            text = file.read().decode(errors="replace").strip()
        return f" It wrote to {self.log}:\n{text}" if text else ""


def _end(process: subprocess.Popen[bytes], uid: int, mark: str) -> None:
    """Reap a killed host, and kill what is left of its descendants, in whatever session."""
    process.wait()
    if os.geteuid() == 0:
        with suppress(OSError):  # no right to change users: neither had the host
            subprocess.run(["/bin/sh", "-c", "kill -9 -1"], user=uid, check=False, stderr=subprocess.DEVNULL)
    for _ in range(ROUNDS):  # what is forked meanwhile is found by the next
        if not (marked := _marked(mark)):
            break
        for pid in marked:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Running processes with this variable in their environment, as far as we may look."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _ending(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"it exited with status {code}"
    hint = " (by hand, or because the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"killed by signal {-code}, {signal.strsignal(-code)}{hint}"
