"""Killable processes for the user's code: a pool of hosts, each running one call at a time.

A call that hangs, exits, crashes or fills its memory ends a host, never the run: it comes back as
a `HostError`, the host and all it started are killed, and a fresh one takes its place while the
others go on. What runs inside is `host_process`.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from openrlhf.rollout.confinement import UIDS
from openrlhf.rollout.host_process import DUMP_SIGNAL, LENGTH
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


def _frame(**request: Any) -> bytes:
    data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


class _Host:
    """One host process, the socket to it and what it has loaded; restarted in place."""

    def __init__(self, memory_bytes: int, environment: Mapping[str, str], log: Path | None) -> None:
        self.memory_bytes, self.environment, self.log = memory_bytes, environment, log
        self.ending: list[threading.Thread] = []  # of earlier processes
        self.start(())

    def start(self, targets: Sequence[str]) -> None:
        """Start the process in a session of its own; it loads `targets` before it answers."""
        self.mark = f"OPENRLHF_HOST={secrets.token_hex(8)}"  # in the environment of all it starts
        self.uid = random.choice(UIDS)  # of the processes, where we are root
        self.loaded: dict[str, dict[str, Any]] = {}  # target -> reply
        self.loading: deque[str] = deque()  # asked for, reply not read yet
        self.expired = False
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        their_end, our_end = os.pipe()
        self.lifeline = os.fdopen(our_end, "wb", buffering=0)
        for target in targets:
            self.ask_to_load(target)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        output = os.dup(2) if self.log is None else os.open(self.log, flags, 0o644)
        arguments = (theirs.fileno(), their_end, self.memory_bytes, self.uid)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "openrlhf.rollout.host_process", *map(str, arguments)],
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

    def ask_to_load(self, target: str) -> None:
        """Have the host load `target`; the reply is read by the first call that needs it."""
        self.socket.sendall(_frame(kind="load", target=target))
        self.loading.append(target)

    async def load(self, target: str, seconds: float) -> Any:
        """The target's parameters, as `host_process.parameters_of` has them, once it is loaded."""
        if target not in self.loaded and target not in self.loading:
            self.ask_to_load(target)
        while self.loading:  # of other targets too: replies come in order
            asked = self.loading.popleft()
            self.loaded[asked] = await self.exchange(b"", seconds, f"loading {asked}")
        reply = self.loaded[target]
        if "error" in reply:
            raise HostLoadError(f"{target} cannot be loaded:\n{reply['error']}")
        return reply["value"]

    async def exchange(self, frame: bytes, seconds: float, activity: str) -> dict[str, Any]:
        """Send a request and wait for the next reply. Raises HostTimeout or HostDied."""
        loop = asyncio.get_running_loop()
        log_start = self.log.stat().st_size if self.log else 0
        timers = (loop.call_later(seconds, self._dump), loop.call_later(seconds + DUMP_SECONDS, self._expire))
        try:
            await loop.sock_sendall(self.socket, frame)
            (length,) = LENGTH.unpack(await self._read(LENGTH.size))
            if length > MAX_REPLY_BYTES:
                limit = f"more than the {MAX_REPLY_BYTES:,} a host may send"
                raise HostDied(f"{activity} returned {length:,} bytes, {limit}", Failure.RESULT)
            return marshal.loads(await self._read(length))
        except (OSError, EOFError):
            self.cut()
            code = await asyncio.to_thread(self.process.wait)
            log = self._printed(log_start)
            if self.expired or code == -DUMP_SIGNAL:  # which ends a host that is still starting
                raise HostTimeout(f"{activity} took more than {seconds:g} s.{log}", Failure.TIMEOUT) from None
            failure = Failure.EXIT if code >= 0 else Failure.KILLED
            raise HostDied(f"{activity} ended its host: {_ending(code)}.{log}", failure) from None
        finally:
            for timer in timers:
                timer.cancel()

    async def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            got = await asyncio.get_running_loop().sock_recv_into(self.socket, rest)
            if got == 0:
                raise EOFError
            rest = rest[got:]
        return data

    def _dump(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, DUMP_SIGNAL)

    def _expire(self) -> None:
        self.expired = True
        self.cut()

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


class HostPool:
    """`workers` hosts that run user code, one call each at a time; for any event loop and thread.

    `memory_gib` limits the data of each process. `log_dir` gets what user code prints, one
    `host-<n>.log` per host; without it, that goes to stderr. `load_timeout` (seconds) bounds the import of a user's file,
    which does not count against a call's own time.
    """

    def __init__(
        self, workers: int, *, memory_gib: float = 4.0, log_dir: Path | None = None, load_timeout: float = 120.0
    ) -> None:
        if workers < 1:
            raise ValueError(f"a host pool needs at least 1 worker, not {workers}")
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # Of what a host of root is then, another user, the password file knows nothing.
        names = {"USER": "root", "HOME": os.path.expanduser("~")} if os.geteuid() == 0 else {}
        variables = {**names, **os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        self._load_timeout, self._memory_gib = load_timeout, memory_gib
        self._targets: list[str] = []  # what a fresh host loads before it is asked
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: deque[Future[_Host]] = deque()
        self._hosts = [
            _Host(int(memory_gib * 2**30), variables, log_dir and log_dir / f"host-{number}.log")
            for number in range(workers)
        ]
        self._idle = list(self._hosts)

    async def check(self, target: str) -> Any:
        """Load `target` in one host, then have the idle ones load it too.

        Returns its parameters as [name, kind, required]. Raises HostLoadError with the traceback:
        a missing file, a syntax error, a missing function.
        """
        async with self._borrow(target) as host:
            parameters = host.loaded[target]["value"]
        with self._lock:
            self._targets = list(dict.fromkeys([*self._targets, target]))
            for host in self._idle:
                if target not in host.loaded and target not in host.loading:
                    with suppress(OSError):  # a dead one is restarted by the call that gets it
                        host.ask_to_load(target)
        return parameters

    async def call(self, target: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """What `path/to/file.py:function` or `package.module:function` returns, as built-in data.

        `timeout` (seconds) counts from the moment a free, loaded host gets the call. Raises
        HostError and its kinds.
        """
        try:
            frame = _frame(kind="call", target=target, args=args, kwargs=kwargs)
        except Exception as error:
            raise HostError(f"the arguments of {target} cannot be sent: {error}") from error
        async with self._borrow(target) as host:
            reply = await host.exchange(frame, timeout, target)
            if reply.get("broken"):
                raise self._error(target, reply)
        if "error" in reply:
            raise self._error(target, reply)
        return reply["value"]

    def close(self) -> None:
        """Kill every host; calls under way and calls that wait end with a HostError."""
        with self._lock:
            self._closed = True
            idle, self._idle, waiting = self._idle, [], list(self._waiting)
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(HostError("the host pool was closed"))
        for host in self._hosts:
            host.stop() if host in idle else host.cut()
        for host in self._hosts:
            _end(host.process, host.uid, host.mark)
            for thread in host.ending:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @asynccontextmanager
    async def _borrow(self, target: str) -> AsyncIterator[_Host]:
        """A host that has loaded `target`, for one call; an exception inside costs its life."""
        host = await self._acquire()
        try:
            if host.process.poll() is not None:
                self._replace(host)
            await host.load(target, self._load_timeout)
            yield host
        except BaseException as error:
            with suppress(OSError):
                self._replace(host)
            if isinstance(error, OSError):
                raise HostDied(f"there is no host for {target}: {error}") from error
            raise
        finally:
            self._release(host)

    def _error(self, target: str, reply: Mapping[str, str]) -> HostError:
        failure = Failure(reply["failure"])
        memory = f"(--reward.memory_gib is {self._memory_gib:g}.)" if failure is Failure.MEMORY else ""
        return HostError(f"{target} raised:\n{reply['error']}{memory}", failure)

    def _replace(self, host: _Host) -> None:
        if not self._closed:
            host.stop()
            host.start(self._targets)

    async def _acquire(self) -> _Host:
        """A free host; those who wait are served in order, from whatever loop they wait."""
        with self._lock:
            if self._closed:
                raise HostError("the host pool was closed")
            if self._idle:
                return self._idle.pop()
            waiter: Future[_Host] = Future()
            self._waiting.append(waiter)
        try:
            return await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was handed a host at the same moment
                self._release(waiter.result())
            raise

    def _release(self, host: _Host) -> None:
        with self._lock:
            if self._closed:
                host.stop()
                return
            while self._waiting:
                waiter = self._waiting.popleft()
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(host)
                    return
            self._idle.append(host)
