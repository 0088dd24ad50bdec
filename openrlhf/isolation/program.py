"""The program that runs in a user process: it loads the user's functions and runs calls.

The pool starts this program with the arguments SOCKET MEMORY_BYTES UID. User code runs in a child
process, so that the parent can kill all processes that user code leaves behind, even if the run was
killed. The program imports only the standard library; torch is imported only if the user's file
imports it. Output that user code prints goes to stdout and stderr and is never parsed. Messages go
through the socket. Messages to the program are pickled. Messages from the program are marshalled:
marshal carries only built-in data, so objects created by user code are never unpickled outside this
process.

    in   call     a function and its arguments     out  done   the result of a call, or its error
         answer   the answer to a question              ask    a call's question to the pool's owner
         cancel   a call has timed out

Functions run in the main thread while no event loop is running, so that a function can start its
own event loop. An awaitable result, such as that of an `async def` function, is awaited in one
event loop together with the other running calls.
"""

import asyncio
import contextvars
import faulthandler
import inspect
import itertools
import marshal
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.core.trajectory import Failure
from openrlhf.isolation import confinement, sandbox
from openrlhf.isolation.loading import load_function, plain

# Maximum number of processes and threads of a user process and its descendants (fork bombs).
PROCESSES = 512
# Number of threads for `asyncio.to_thread`, shared by waiting calls and hanging late calls.
THREADS = 256
STACK_BYTES = 2 << 20  # stack size of each thread; stacks count toward the process's memory limit
MAX_MESSAGE_BYTES = 1 << 26  # maximum size of a message from a user process
LONGEST_ERROR = 100_000  # maximum length of an error in characters
OURS = (str(Path(__file__).parents[1]), "<frozen importlib")
LENGTH = struct.Struct("!Q")  # each message is preceded by its length in bytes
DUMP_SIGNAL = (
    signal.SIGUSR1
)  # a user process that receives this signal writes the stack trace of its main thread to stderr
Ask = Callable[[Any], Coroutine[Any, Any, Any]]
ASK = contextvars.ContextVar[Ask]("sends the current call's questions to the pool's owner")


class Program:
    """The running calls and the connection to the pool."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._process = channel, os.getpid()
        self.loop = asyncio.new_event_loop()
        # Calls to run; None means that the pool disconnected.
        self._incoming: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._questions = itertools.count()

    def serve(self) -> None:
        """Run calls until the pool disconnects."""
        threading.stack_size(STACK_BYTES)
        self.loop.set_default_executor(ThreadPoolExecutor(THREADS))
        reading = self.loop.create_task(self._read())
        while call := self.loop.run_until_complete(self._incoming.get()):
            contextvars.copy_context().run(self._begin, **call)
        reading.result()

    async def _read(self) -> None:
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._channel)
            while header := await reader.read(1):
                header += await reader.readexactly(LENGTH.size - 1)
                message = pickle.loads(await reader.readexactly(*LENGTH.unpack(header)))
                match message.pop("kind"):
                    case "call":
                        self._incoming.put_nowait(message)
                    case "cancel" if task := self._tasks.get(message["call"]):
                        task.cancel()
                    case "answer" if answer := self._answers.pop(message["question"], None):
                        if not answer.done():  # the asking call may have been cancelled
                            answer.set_result(message["answer"])
        finally:
            self._incoming.put_nowait(None)

    def _begin(self, call: int, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ASK.set(partial(self.ask, call))
        try:
            result = load_function(target)(*args, **kwargs)
        except BaseException as error:
            self._failed(call, error, Failure.EXCEPTION)
            return
        if inspect.isawaitable(result):
            self._tasks[call] = self.loop.create_task(self._finish(call, result))
        else:
            self._finished(call, result)

    async def _finish(self, call: int, result: Any) -> None:
        try:
            value = await result
        except BaseException as error:
            self._failed(call, error, Failure.EXCEPTION)
        else:
            self._finished(call, value)
        finally:
            del self._tasks[call]

    def _finished(self, call: int, value: Any) -> None:
        try:
            self._send(kind="done", call=call, value=plain(value))
        except BaseException as error:
            self._failed(call, error, Failure.RESULT)

    def _failed(self, call: int, error: BaseException, otherwise: Failure) -> None:
        """Send a call's error; some errors mark the process as not reusable."""
        failure, text = failure_of(error, otherwise), traceback_of(error)[-LONGEST_ERROR:]
        full = failure is not Failure.MEMORY and _is_full()
        if full:
            text += (
                "This process and its descendants have reached the limit of "
                f"{PROCESSES} processes and threads. "
            )
        scarce = full or failure is Failure.MEMORY  # other calls may have used up the resource
        self._send(kind="done", call=call, error=text, failure=str(failure), scarce=scarce)

    def _send(self, **message: Any) -> None:
        if os.getpid() != self._process:  # user code forked, and the child returned to this code
            os._exit(0)
        data = marshal.dumps(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"returned {len(data):,} bytes, more than the maximum message size of "
                f"{MAX_MESSAGE_BYTES:,} bytes"
            )
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def ask(self, call: int, question: Any) -> Any:
        """Send a call's question to the pool's owner and return the answer.

        A question from another thread's event loop or from a finished call cannot be attributed to
        a call, so it is sent without one.
        """
        if asyncio.get_running_loop() is self.loop:
            return await self._ask(call if call in self._tasks else None, question)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._ask(None, question), self.loop)
        )

    async def _ask(self, call: int | None, question: Any) -> Any:
        number = next(self._questions)
        self._answers[number] = answer = self.loop.create_future()
        self._send(kind="ask", call=call, number=number, question=plain(question))
        return await answer


def failure_of(error: BaseException, otherwise: Failure) -> Failure:
    """Classify an exception from user code. This package's errors have a `failure` attribute."""
    own = getattr(error, "failure", None)
    if isinstance(own, Failure):
        return own
    if isinstance(error, MemoryError):
        return Failure.MEMORY
    return otherwise if isinstance(error, Exception | asyncio.CancelledError) else Failure.EXIT


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, starting at the first frame of user code.

    Exceptions chained to one of our own errors are omitted, because the error's message is
    complete.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    ours = isinstance(getattr(error, "failure", None), Failure)
    return "".join(traceback.format_exception(type(error), error, frames, chain=not ours))


def _is_full() -> bool:
    """Return True if this process has reached its limit on processes and threads."""
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return True
    return False


def main(socket_fd: int, memory_bytes: int, uid: int) -> None:
    """Run user code in a child process, then kill all its remaining processes.

    The child is killed when the pool closes this process's standard input or sends SIGTERM.
    """
    confinement.limit(resource.RLIMIT_CORE, 0)
    confinement.adopt_orphans()
    owner = os.urandom(8).hex()
    os.environ[sandbox.OWNER] = owner
    if (child := os.fork()) == 0:
        os.setsid()  # signals that user code sends to its process group must not reach this process
        return run_user_code(socket.socket(fileno=socket_fd), memory_bytes, uid)
    os.close(socket_fd)
    signal.signal(DUMP_SIGNAL, lambda *_: os.kill(child, DUMP_SIGNAL))
    signal.signal(signal.SIGCHLD, lambda *_: confinement.reap_orphans(child))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    select.select([sys.stdin, os.pidfd_open(child)], [], [])
    # From here on, these signal handlers would signal a process that has already ended.
    for number in (signal.SIGTERM, DUMP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(confinement.end_all(child))
    sandbox.remove_folders_of(owner)
    if code < 0:  # terminate with the same signal as the child
        with suppress(OSError):  # the handler of SIGKILL cannot be set and needs no reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_user_code(channel: socket.socket, memory_bytes: int, uid: int) -> None:
    """Set the limits of this process and serve calls.

    RLIMIT_DATA is set rather than RLIMIT_AS because torch reserves a large address space.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    confinement.limit(resource.RLIMIT_DATA, memory_bytes)
    # If the machine runs out of memory, the kernel should kill a user process first.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    confinement.limit_processes(PROCESSES, uid)
    confinement.die_with_parent()  # must follow the change of user, which resets this setting
    channel.set_inheritable(False)
    try:
        Program(channel).serve()
    # A callback or task of user code raised SystemExit.
    # Exit before asyncio cancels the other calls.
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        os._exit(code)
