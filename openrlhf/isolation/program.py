"""The program that a user process runs: it loads the user's functions, and answers the calls of its
pool.

The pool starts it with the arguments SOCKET MEMORY_BYTES UID. User code runs in a child, so that
the process itself can end all that user code leaves behind, even if the run was killed. The program
imports the standard library only: torch is here if the user's file imports it. What user code
prints goes to stdout and stderr, which nobody reads as data. Messages go through the socket. Those
to the program are pickled. Those from the program are marshalled, which holds built-in data only,
so that no object of user code comes to life outside.

    in   call     a function and its arguments     out  done   the result of a call, or its error
         answer   the answer to a question              ask    a call's question to the pool's owner
         cancel   a call has run out of time

A function runs in the main thread while no event loop runs, so that it may start its own. If its
result can be awaited, as that of `async def`, it is awaited in one event loop, together with the
other calls under way.
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
from typing import Any, NoReturn

from openrlhf.core.trajectory import Failure
from openrlhf.isolation import confinement
from openrlhf.isolation.loading import load_function, plain

PROCESSES = 512  # and threads, of a user process and what it starts: a fork bomb ends here
# For calls that wait in `asyncio.to_thread`, and for late calls that still hang there.
THREADS = 256
STACK_BYTES = 2 << 20  # of each thread; stacks count towards the memory of the process
MAX_MESSAGE_BYTES = 1 << 26  # of a message from a user process
LONGEST_ERROR = 100_000  # characters
OURS = (str(Path(__file__).parents[1]), "<frozen importlib")
LENGTH = struct.Struct("!Q")  # a message is its length in bytes, then its content
DUMP_SIGNAL = signal.SIGUSR1  # makes a user process write the stack of its main thread to stderr
Ask = Callable[[Any], Coroutine[Any, Any, Any]]
ASK = contextvars.ContextVar[Ask]("asks the pool's owner, for the call that runs here")


class Program:
    """The calls under way, and the connection to the pool."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._process = channel, os.getpid()
        self.loop = asyncio.new_event_loop()
        self._incoming = asyncio.Queue[dict[str, Any] | None]()  # calls; None: the pool is gone
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._questions = itertools.count()

    def serve(self) -> None:
        """Answer calls until the pool is gone."""
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
                        if not answer.done():  # its call may have given up
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
        """Send an error. After some errors the process should not be used again."""
        failure, text = failure_of(error, otherwise), traceback_of(error)[-LONGEST_ERROR:]
        full = failure is not Failure.MEMORY and _is_full()
        if full:
            text += (
                "This process and what it started have reached the limit of "
                f"{PROCESSES} processes and threads. "
            )
        scarce = full or failure is Failure.MEMORY  # what this call lacked, others may have used up
        last = scarce or failure is Failure.EXIT
        self._send(
            kind="done", call=call, error=text, failure=str(failure), scarce=scarce, last=last
        )

    def _send(self, **message: Any) -> None:
        if os.getpid() != self._process:  # user code forked, and the copy came here too
            os._exit(0)
        data = marshal.dumps(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"returned {len(data):,} bytes, more than the {MAX_MESSAGE_BYTES:,} "
                "that may be sent"
            )
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def ask(self, call: int, question: Any) -> Any:
        """What the pool's owner answers to a call.

        A question from another thread's event loop, or from a call that is over, comes from some
        call under way.
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
    """What an exception of user code counts as; an error of ours that passes through user code says
    so itself.
    """
    own = getattr(error, "failure", None)
    if isinstance(own, Failure):
        return own
    if isinstance(error, MemoryError):
        return Failure.MEMORY
    return otherwise if isinstance(error, Exception | asyncio.CancelledError) else Failure.EXIT


def traceback_of(error: BaseException) -> str:
    """The traceback from the first frame that is the user's. Of an error of ours, which says all,
    the message alone.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    ours = isinstance(getattr(error, "failure", None), Failure)
    return "".join(traceback.format_exception(type(error), error, frames, chain=not ours))


def _is_full() -> bool:
    """Whether this process can start nothing more; the kernel counts threads like processes."""
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return True
    return False


def main(socket_fd: int, memory_bytes: int, uid: int) -> None:
    """Start the process of user code. When it ends, or when the pool closes our standard input, end
    all that is left of it.
    """
    confinement.limit(resource.RLIMIT_CORE, 0)
    confinement.adopt_orphans()
    if (child := os.fork()) == 0:
        os.setsid()  # signals that user code sends to its own process group do not reach us
        return run_user_code(socket.socket(fileno=socket_fd), memory_bytes, uid)
    os.close(socket_fd)
    signal.signal(DUMP_SIGNAL, lambda *_: os.kill(child, DUMP_SIGNAL))
    signal.signal(signal.SIGCHLD, lambda *_: confinement.reap_orphans(child))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    select.select([sys.stdin, os.pidfd_open(child)], [], [])
    for number in (
        signal.SIGTERM,
        DUMP_SIGNAL,
    ):  # whose handlers would signal a process that is gone
        signal.signal(number, signal.SIG_IGN)
    end_like(os.waitstatus_to_exitcode(confinement.end_all(child)))


def end_like(code: int) -> NoReturn:
    """End this process with an exit status, or by the signal -code."""
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other effect anyway
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_user_code(channel: socket.socket, memory_bytes: int, uid: int) -> None:
    """Set limits and serve. Data is limited, not address space, of which torch reserves plenty."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    confinement.limit(resource.RLIMIT_DATA, memory_bytes)
    # If the whole machine runs short of memory, the kernel should kill a user process first.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    confinement.limit_processes(PROCESSES, uid)
    confinement.die_with_parent()  # after the change of user, which would take it back
    channel.set_inheritable(False)
    try:
        Program(channel).serve()
    except (
        SystemExit
    ) as end:  # of a callback or task of user code; before the calls of others are cancelled
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
