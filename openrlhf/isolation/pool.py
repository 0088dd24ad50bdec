"""A pool of processes that run user code, with one or several concurrent calls in each process.

A call that hangs, exits, crashes or runs out of memory ends its process, never the run. The call
raises `UserCodeError`. The process and all its descendants are killed, and a new process, which
loads the same file, replaces it while the rest of the pool continues.

If the process was running several calls, only the call at fault fails. Calls that were waiting for
an answer are retried in another process. Calls whose own code was running are also retried, each
alone in a process, because any of them may be at fault and may end that process as well.
"""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.event_loop import EventLoopThread
from openrlhf.isolation.call import Asked, Limits, ProcessLost, UserCall, UserCodeError
from openrlhf.isolation.process import UserProcess, log_size
from openrlhf.reporting import warn_once
from openrlhf.units import MIB

__all__ = ["Asked", "ProcessPool", "UserCall", "UserCodeError"]

LOAD_S = 120.0  # minimum time limit for importing a user's file
LEAST_ALONE = 4  # minimum number of processes reserved for calls that run alone
# After this number of lost processes, a call that only waited for answers fails or runs alone.
LOSSES = 4
LOG_BYTES = 16 << 20  # logs larger than this are shortened
LOG_KEPT = MIB  # bytes kept at each end of a shortened log
LOG_SECONDS = 1.0  # interval between checks of the log sizes
T = TypeVar("T")


class ProcessPool:
    """A pool of `workers` processes that run user code, each with up to `at_once` concurrent calls.

    The pool can be used from any thread and event loop. A process starts at its first call.
    `memory_gib` limits the data (RLIMIT_DATA) of each process. With `log_dir`, each process writes
    the output of user code to a file in this folder, `<name>-<n>.log`. Without `log_dir`, the
    output goes to stderr. `grace` (in seconds) is defined in `Limits`.
    """

    def __init__(
        self,
        workers: int,
        *,
        at_once: int = 1,
        memory_gib: float = 4.0,
        grace: float = 0.0,
        log_dir: Path | None = None,
        name: str = "user",
    ) -> None:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        limits = Limits(memory_gib=memory_gib, at_once=at_once, grace=grace)
        self._shared = _Processes(workers, limits, log_dir and log_dir / name)
        self._alone = _Processes(
            max(LEAST_ALONE, workers),
            replace(limits, at_once=1),
            log_dir and log_dir / f"{name}-alone",
        )
        self._closed = False
        self._loop = EventLoopThread(f"{name} processes")
        logs = [log for log in (*self._shared.logs, *self._alone.logs) if log]
        self._keeping_short = self._submit(_keep_short(logs))

    async def check(self, target: str) -> Any:
        """Load a function and return its parameters (see `parameters_of`).

        Raises UserCodeError if the function cannot be loaded.
        """
        setup = _load_of(target, 0.0)
        return await self.run(setup, setup)

    async def call(self, target: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call a function in a process of the pool and return its result as built-in data.

        `target` is `path/to/file.py:function` or `package.module:function`. `timeout` (seconds)
        starts when a process that has loaded the function receives the call. Raises UserCodeError.
        """
        call = UserCall(
            name=target,
            target=target,
            args=args,
            kwargs=kwargs,
            seconds=timeout,
            limit="--reward.timeout",
        )
        return await self.run(call, _load_of(target, timeout))

    async def run(self, call: UserCall, setup: UserCall) -> Any:
        """Return the result of `call`, run in a process that has run `setup` once.

        The arguments `call` and `setup` may be the same call. Raises UserCodeError.
        """
        return await asyncio.wrap_future(self._submit(self._run(call, setup)))

    async def _run(self, call: UserCall, setup: UserCall) -> Any:
        try:
            return await self._shared.run(call, setup)
        except ProcessLost as lost:
            if lost.again is None or call is setup or self._closed:
                raise
        warn_once(
            "User code calls that lost their process, were blocked, or ran out of memory next to "
            "other calls are retried, each in its own process."
        )
        return await self._alone.run(call, setup)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise UserCodeError("the pool of processes was closed")
        return self._loop.submit(work)

    def close(self) -> None:
        """Kill every process; running and queued calls raise UserCodeError."""
        if self._closed:
            return
        ending = self._submit(self._close())
        self._closed = True
        ending.result()
        self._loop.close()

    async def _close(self) -> None:
        self._keeping_short.cancel()
        await asyncio.gather(self._shared.close(), self._alone.close())
        # calls that have not yet raised their errors
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*calls, return_exceptions=True)


def loading(name: str, target: str, *args: Any, seconds: float, limit: str) -> UserCall:
    """Return a call that loads a user's file within `seconds` or `LOAD_S`, whichever is longer."""
    if seconds <= LOAD_S:
        seconds, limit = LOAD_S, f"raise {limit} to allow more"
    return UserCall(name=f"loading {name}", target=target, args=args, seconds=seconds, limit=limit)


def _load_of(target: str, timeout: float) -> UserCall:
    return loading(
        target,
        "openrlhf.isolation.loading:parameters_of",
        target,
        seconds=timeout,
        limit="--reward.timeout",
    )


class _Processes:
    """A fixed number of processes, each replaced when it ends.

    All calls must come from a single event loop.
    """

    def __init__(self, count: int, limits: Limits, log: Path | None) -> None:
        self.limits = limits
        self.logs = [log and Path(f"{log}-{number}.log") for number in range(count)]
        self._processes = [UserProcess(limits, log) for log in self.logs]
        self._replaced: list[UserProcess] = []  # replaced processes that may still be ending
        # Calls acquire the semaphore in order of arrival.
        self._places = asyncio.Semaphore(count * limits.at_once)
        self._closed: UserCodeError | None = None

    async def run(self, call: UserCall, setup: UserCall) -> Any:
        """Run a call and return its result; retry it if another call ended its process."""
        losses = 0
        async with self._places:
            while True:
                process = self._pick()
                try:
                    return await process.run(call, setup)
                except ProcessLost as lost:
                    losses += 1
                    if lost.again != "anywhere" or call is setup or losses == LOSSES:
                        raise
                finally:
                    if call is not setup:
                        self._renew(process, setup)

    def _pick(self) -> UserProcess:
        """Return the process with the fewest calls, preferring one that has started."""
        if self._closed:
            raise self._closed
        process = min(self._processes, key=lambda each: (each.calls_given, not each.started))
        if not process.retiring:
            return process
        return self._replace(process)

    def _replace(self, process: UserProcess) -> UserProcess:
        self._replaced = [each for each in self._replaced if not each.gone] + [process]
        number = self._processes.index(process)
        self._processes[number] = UserProcess(self.limits, self.logs[number])
        return self._processes[number]

    def _renew(self, process: UserProcess, setup: UserCall) -> None:
        """Replace a process that has ended, so that the next call need not wait for `setup`."""
        if process in self._processes and process.retiring and not self._closed:
            self._replace(process).load_once(setup)

    async def close(self) -> None:
        """Kill all processes and wait until they have ended."""
        self._closed = closed = UserCodeError("the pool of processes was closed")
        await asyncio.gather(
            *(process.close(closed) for process in [*self._processes, *self._replaced])
        )


async def _keep_short(logs: Sequence[Path]) -> None:
    """Repeatedly cut the middle out of each log that exceeds `LOG_BYTES`, until cancelled."""
    removed = dict.fromkeys(logs, 0)  # bytes
    while True:
        for log in logs:
            if (size := log_size(log)) > LOG_BYTES:
                removed[log] += size - 2 * LOG_KEPT
                with suppress(OSError):  # for example, the user has removed the log
                    _cut(log, f"\n[{removed[log]:,} bytes were removed here to shorten the log]\n")
        await asyncio.sleep(LOG_SECONDS)


def _cut(log: Path, words: str) -> None:
    """Keep the beginning and the end of a log while processes continue to append to it."""
    with log.open("r+b") as file:
        file.seek(-LOG_KEPT, os.SEEK_END)
        end = file.read()
        file.truncate(LOG_KEPT)
    with log.open("ab") as file:
        file.write(words.encode() + end)
