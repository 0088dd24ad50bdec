"""A pool of hosts, each running one call of the user's code at a time.

A call that hangs, exits, crashes or fills its memory ends a host, never the run: it comes back as
a `HostError`, the host and all it started are killed, and a fresh one takes its place while the
others go on. What runs inside is `host_process`.
"""

from __future__ import annotations

import asyncio
import marshal
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from openrlhf.processes.host import (
    DUMP_SECONDS,
    MAX_REPLY_BYTES,
    HostDied,
    HostError,
    HostLoadError,
    HostProcess,
    HostTimeout,
    frame,
)
from openrlhf.processes.host_process import LENGTH
from openrlhf.trajectory import Failure

__all__ = ["HostDied", "HostError", "HostLoadError", "HostPool", "HostTimeout"]


class _Host(HostProcess):
    """A host that runs one call at a time, and what it has loaded."""

    def __init__(self, memory_bytes: int, log: Path | None) -> None:
        super().__init__("openrlhf.processes.host_process", memory_bytes, log)
        self.restart(())

    def restart(self, targets: Sequence[str]) -> None:
        """Start the process; it loads `targets` before it answers."""
        self.loaded: dict[str, dict[str, Any]] = {}  # target -> reply
        self.loading: deque[str] = deque()  # asked for, reply not read yet
        self.expired = False
        self.start()
        for target in targets:
            self.ask_to_load(target)

    def ask_to_load(self, target: str) -> None:
        """Have the host load `target`; the reply is read by the first call that needs it."""
        self.socket.sendall(frame(kind="load", target=target))
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

    async def exchange(self, request: bytes, seconds: float, activity: str) -> dict[str, Any]:
        """Send a request and wait for the next reply. Raises HostTimeout or HostDied."""
        loop = asyncio.get_running_loop()
        log_start = self.log_size
        timers = (loop.call_later(seconds, self.dump), loop.call_later(seconds + DUMP_SECONDS, self._expire))
        try:
            await loop.sock_sendall(self.socket, request)
            (length,) = LENGTH.unpack(await self._read(LENGTH.size))
            if length > MAX_REPLY_BYTES:
                limit = f"more than the {MAX_REPLY_BYTES:,} a host may send"
                raise HostDied(f"{activity} returned {length:,} bytes, {limit}", Failure.RESULT)
            return marshal.loads(await self._read(length))
        except (OSError, EOFError):
            raise await self.loss(activity, seconds, log_start, expired=self.expired) from None
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

    def _expire(self) -> None:
        self.expired = True
        self.cut()


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
        self._load_timeout, self._memory_gib = load_timeout, memory_gib
        self._targets: list[str] = []  # what a fresh host loads before it is asked
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: deque[Future[_Host]] = deque()
        self._hosts = [
            _Host(int(memory_gib * 2**30), log_dir and log_dir / f"host-{number}.log") for number in range(workers)
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
            request = frame(kind="call", target=target, args=args, kwargs=kwargs)
        except Exception as error:
            raise HostError(f"the arguments of {target} cannot be sent: {error}") from error
        async with self._borrow(target) as host:
            reply = await host.exchange(request, timeout, target)
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
            host.buried()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @asynccontextmanager
    async def _borrow(self, target: str) -> AsyncIterator[_Host]:
        """A host that has loaded `target`, for one call; an exception inside costs its life."""
        host = await self._acquire()
        try:
            if host.expired or host.process.poll() is not None:  # expired: its last reply came as its time was over
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
            host.restart(self._targets)

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
