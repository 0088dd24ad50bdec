"""One process that runs user code: its start, its running calls, their deadlines, and its end.

A process that hangs, exits, crashes or runs out of memory is killed with all its descendants.
"""

import asyncio
import itertools
import marshal
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from openrlhf.core.trajectory import Failure
from openrlhf.isolation.call import Asked, Limits, ProcessLost, UserCall, UserCodeError
from openrlhf.isolation.confinement import UIDS
from openrlhf.isolation.program import DUMP_SIGNAL, LENGTH, MAX_MESSAGE_BYTES
from openrlhf.reporting import warn
from openrlhf.units import GIB

END_S = 5.0  # time for a process and all its descendants to end before the process is killed
DUMP_S = 0.5  # time for a late call to write the stack trace that shows where it hangs
SLOW_LOAD_S = 10.0  # time after which an unfinished load is reported
PROGRAM = "import sys; from openrlhf.isolation.program import main; main(*map(int, sys.argv[1:]))"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


@dataclass(eq=False, kw_only=True)
class _Running:
    """A running call."""

    number: int
    call: UserCall
    done: asyncio.Future[Any]
    log_start: int  # size of the log in bytes when the call started
    questions: int = 0  # number of questions asked so far
    waiting: set[asyncio.Task[None]] = field(default_factory=set)  # tasks that compute answers
    clock: asyncio.Timeout  # time limit of the call's own work
    late: str | None = None  # description of the deadline that the call missed


class UserProcess:
    """A user process, from its first call until it ends. Only one event loop uses the process."""

    def __init__(self, limits: Limits, log: Path | None) -> None:
        self.limits, self.log = limits, log
        self.calls_given = 0
        # True if the process accepts no further calls: it is ending, or a late call may have left
        # hanging threads.
        self.retiring = False
        self.loads: dict[UserCall, asyncio.Task[Any]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._calls: dict[int, _Running] = {}
        self._numbers = itertools.count()
        self._connected: asyncio.Task[None] | None = None
        # The error raised by the remaining calls, unless the process ended by itself.
        self._ending: UserCodeError | None = None
        self._culprit_known = False
        self.gone = False

    @property
    def started(self) -> bool:
        """True if the process is running and accepts calls."""
        return self.process is not None and not self.retiring

    async def run(self, call: UserCall, setup: UserCall) -> Any:
        """Run `setup` once, then `call`, and return the result of `call`.

        `setup` may be the call itself. Raises UserCodeError.
        """
        self.calls_given += 1
        try:
            loaded = await asyncio.shield(self.load_once(setup))
            if call is setup:
                return loaded
            return await self._run(call)
        finally:
            self.calls_given -= 1
            if self.retiring and not self.calls_given:
                self.cut()

    def load_once(self, setup: UserCall) -> asyncio.Task[Any]:
        """Start running `setup`, unless it was started before. Returns its task."""
        if setup not in self.loads:
            self.loads[setup] = asyncio.create_task(self._load(setup))
            # Retrieve the exception: asyncio logs an error if no caller awaits the task.
            self.loads[setup].add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.loads[setup]

    async def _load(self, setup: UserCall) -> Any:
        if self._connected is None:
            self._connected = asyncio.create_task(self._start())
        await asyncio.shield(self._connected)
        announced = asyncio.get_running_loop().call_later(
            SLOW_LOAD_S,
            warn,
            f"{setup.name} has taken {SLOW_LOAD_S:g} s so far; its limit is {setup.seconds:g} s.",
        )
        try:
            return await self._run(setup)
        except ProcessLost as lost:
            if lost.failure is Failure.TIMEOUT:
                lost.again = None
            else:
                lost.again = "anywhere"
            raise
        finally:
            announced.cancel()

    async def _start(self) -> None:
        """Start the process in its own session, and start reading its messages."""
        ours, theirs = socket.socketpair()
        uid = random.choice(UIDS)  # user id of user code if this process runs as root
        output = self._open_log()
        memory_bytes = int(self.limits.memory_gib * GIB)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, (theirs.fileno(), memory_bytes, uid))],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Closing this pipe ends the user process.
                # The kernel closes the pipe if this process is killed.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_environment(),
            )
        except OSError as error:
            ours.close()
            raise UserCodeError(
                f"could not start a process for user code: {error}", Failure.KILLED
            ) from error
        finally:
            theirs.close()
            os.close(output)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._listening = asyncio.create_task(self._listen(self.process))

    def _open_log(self) -> int:
        """Open the log, or duplicate stderr if there is no log or it cannot be opened."""
        if self.log:
            try:
                return os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as error:  # for example, the disk is full
                warn(f"Cannot open {self.log}: {error.strerror}. User code prints to stderr.")
        return os.dup(2)

    async def _run(self, call: UserCall) -> Any:
        done = asyncio.get_running_loop().create_future()
        clock, total = asyncio.timeout(call.seconds), asyncio.timeout(call.total_seconds)
        running = _Running(
            number=next(self._numbers),
            call=call,
            done=done,
            log_start=log_size(self.log),
            clock=clock,
        )
        call.asked.clear()
        if self.gone:
            raise ProcessLost(
                self._ending or UserCodeError(f"{call.name} had no process", Failure.KILLED),
                "anywhere",
            )
        self._calls[running.number] = running
        try:
            self._write(
                kind="call",
                call=running.number,
                target=call.target,
                args=call.args,
                kwargs=dict(call.kwargs),
            )
            with suppress(TimeoutError):
                async with total, clock:
                    await asyncio.wait([done])
            if not done.done():
                if clock.expired():
                    exceeded = f"{call.seconds:g} s ({call.limit})"
                else:
                    exceeded = f"{call.total_seconds:g} s ({call.total_limit})"
                running.late = f"{call.name} took more than {exceeded}"
                await self._end(running)
            return await done
        except asyncio.CancelledError:  # the caller gave up
            if self.limits.at_once == 1:  # a call that blocks must not delay the next call
                self.cut()
            else:
                self._write(kind="cancel", call=running.number)
            raise
        finally:
            del self._calls[running.number]
            for task in running.waiting:
                if not any(task in other.waiting for other in self._calls.values()):
                    task.cancel()

    async def _end(self, late: _Running) -> None:
        """Cancel a late call; kill the process if the call does not end."""
        self.retiring = True
        self._write(kind="cancel", call=late.number)
        if not (await asyncio.wait([late.done], timeout=self.limits.grace))[0]:
            assert self.process
            self.process.send_signal(DUMP_SIGNAL)
            if not (await asyncio.wait([late.done], timeout=DUMP_S))[0]:
                self.cut()

    async def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Read messages until the process ends, then fail the remaining calls."""
        # User code that writes to our socket causes any of the last four errors.
        broken = (OSError, EOFError, ValueError, TypeError, AttributeError, KeyError)
        with suppress(*broken):
            while not self._culprit_known:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if length > MAX_MESSAGE_BYTES:
                    break
                message = marshal.loads(await self._reader.readexactly(length))
                kind, running = message.pop("kind"), self._calls.get(message.pop("call"))
                if kind == "ask":
                    self._ask(running, **message)
                elif running and not running.done.done():
                    self._done(running, message)
        self.gone = True
        self.cut()
        self._writer.transport.abort()
        code = await asyncio.to_thread(process.wait)
        left = [running for running in self._calls.values() if not running.done.done()]
        suspects: list[_Running] = []
        if not self._culprit_known:
            suspects = [running for running in left if running.late or not running.waiting]
        for running in left:
            again: Literal["anywhere", "alone"] | None = "anywhere"
            if suspects == left == [running]:
                again = None  # the call itself killed the process
            elif running in suspects:
                again = "alone"
            running.done.set_exception(
                ProcessLost(self._ending or self._loss(running, code), again)
            )

    def _loss(self, running: _Running, code: int) -> UserCodeError:
        """Return an error that describes how the process ended and quotes the call's output."""
        log = _printed(self.log, running.log_start)
        if running.late:
            return UserCodeError(f"{running.late}.{log}", Failure.TIMEOUT)
        ended = f"{running.call.name} ended its process"
        if code >= 0:
            return UserCodeError(f"{ended}: it exited with status {code}.{log}", Failure.EXIT)
        cause = f"killed by signal {-code}, {signal.strsignal(-code)}"
        if code == -signal.SIGKILL:
            cause += " (manually, or because the machine ran out of memory)"
        return UserCodeError(f"{ended}: {cause}.{log}", Failure.KILLED)

    def _done(self, running: _Running, message: dict[str, Any]) -> None:
        """Set the result or the error of a finished call."""
        if "error" not in message:
            running.done.set_result(message["value"])
            return
        failure = Failure(message["failure"])
        text = message["error"]
        if failure is Failure.MEMORY:
            text += f"(--reward.memory_gib is {self.limits.memory_gib:g}.)"
        error = UserCodeError(f"{running.call.name} failed:\n{text}", failure)
        if running.late:
            error = UserCodeError(
                f"{running.late} and was interrupted here:\n{text}", Failure.TIMEOUT
            )
        # The call ran out of memory or processes, which other calls may be holding.
        if message["scarce"] and len(self._calls) > 1:
            error = ProcessLost(error, "alone")
        running.done.set_exception(error)
        self._culprit_known = message["scarce"] or failure is Failure.EXIT

    def _ask(self, running: _Running | None, *, number: int, question: Any) -> None:
        """Answer a call's question, pausing the call's clock until the answer arrives.

        If the asking call is unknown, the clock of every running call is paused.
        """
        askers = [running] if running else list(self._calls.values())
        answering = next(
            (each for each in askers if each.call.answer and not each.done.done()), None
        )
        if answering is None:
            return

        async def answer(place: int) -> None:
            try:
                assert answering.call.answer
                given = await answering.call.answer(place, question)
            except Exception as failed:  # an error in the pool's owner, not in user code
                if not answering.done.done():
                    answering.done.set_exception(failed)
                    self._write(kind="cancel", call=answering.number)
                return
            for each in askers:
                each.waiting.discard(task)
                each.call.asked.append(Asked(question, given, own=running is not None))
                if not each.waiting:
                    _set(each.clock, asyncio.get_running_loop().time() + each.call.seconds)
            self._write(kind="answer", question=number, answer=given)

        task = asyncio.create_task(answer(answering.questions))
        answering.questions += 1
        for each in askers:
            each.waiting.add(task)
            _set(each.clock, None)

    def _write(self, **message: Any) -> None:
        if self._writer.is_closing():  # the process has ended, and `_listen` fails its calls
            return
        try:
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UserCodeError(
                f"the arguments of {message.get('target')} cannot be sent: {error}"
            ) from error
        self._writer.write(LENGTH.pack(len(data)) + data)

    def cut(self) -> None:
        """Ask the process to end with all its descendants, and kill it after `END_S` seconds.

        `_listen` then fails the remaining calls.
        """
        self.retiring = True
        if self.process and self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
            # A process forked here may hold the pipe open, so closing it may not be enough.
            self.process.terminate()
            loop = asyncio.get_running_loop()
            # Kill the process with its user code, which may have stopped it (SIGSTOP).
            loop.call_later(END_S, self.process.kill)
            loop.call_later(END_S, self._writer.transport.abort)

    async def close(self, why: UserCodeError) -> None:
        """Kill the process and wait until it has ended. The process's running calls raise `why`."""
        self._ending = why
        if self._connected:
            with suppress(UserCodeError):
                await asyncio.shield(self._connected)
                self.cut()
                await self._listening


def _set(clock: asyncio.Timeout, end: float | None) -> None:
    with suppress(RuntimeError):  # the call is late or finished
        clock.reschedule(end)


def _environment() -> dict[str, str]:
    """Return the environment of user processes: this process's environment plus its import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # A process started by root runs under a user id without an entry in the password file.
    names = {"USER": "root", "HOME": os.path.expanduser("~")} if os.geteuid() == 0 else {}
    return {**names, **os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def log_size(log: Path | None) -> int:
    """Return the size of a log in bytes; 0 if it cannot be read, e.g. if the user removed it."""
    if log:
        with suppress(OSError):
            return log.stat().st_size
    return 0


def _printed(log: Path | None, start: int) -> str:
    """Return at most the last 4000 bytes logged since byte `start`, for an error message."""
    written = b""
    if log:
        with suppress(OSError):
            written = log.read_bytes()
    if start > len(written):  # the log exceeded its maximum size and was cut
        start = 0
    text = written[start:][-4000:].decode(errors="replace").strip()
    if not text:
        return ""
    return f" Output in {log}:\n{text}"
