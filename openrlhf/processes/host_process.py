"""The program a host runs: loads functions once and answers one call at a time, in its main thread.

`HostPool` starts it as `python -m openrlhf.processes.host_process SOCKET LIFELINE MEMORY_BYTES UID`. It
imports the standard library only: torch is here if the user's file brings it. What user code
prints goes to stdout and stderr, which nobody reads as data: requests (pickled) and replies
(marshalled: built-in data only, so nothing of the user's comes to life outside) have a socket.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import importlib
import importlib.util
import inspect
import marshal
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.processes import confinement
from openrlhf.trajectory import Failure

PROCESSES = 512  # and threads, of a host and what it starts: a fork bomb ends here
OURS = (str(Path(__file__).parents[1]), "<frozen importlib")
LENGTH = struct.Struct("!Q")  # a request or reply is its length in bytes, then itself
DUMP_SIGNAL = signal.SIGUSR1  # makes a host write the stack of its main thread to stderr


def plain(value: Any) -> Any:
    """`value` as built-in numbers, text, lists and dicts; tensors and arrays by their `tolist`.

    Raises TypeError naming the type where there is no such form.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "__float__"):
        return float(value)
    kind = type(value).__qualname__
    raise TypeError(f"returned type {kind}; only numbers, text, lists, dicts and tensors can leave")


def load_file(path: Path) -> ModuleType:
    """Import the file at `path`, with its folder first on the import path for its neighbours."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    name = f"user_file_{path.stem}"  # a file called math.py must not replace math
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_function(target: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` or `package.module:name` means."""
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py")
    module = load_file(Path(place).resolve()) if is_file else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        known = ", ".join(names) or "none"
        raise AttributeError(f"{place} has no function {name}; its functions are: {known}")
    return function


def parameters_of(function: Callable[..., Any]) -> list[list[Any]] | None:
    """[name, kind, required] of each parameter, in the words of `inspect`; None if unreadable."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        [each.name, each.kind.name, each.default is each.empty and each.kind not in variable] for each in parameters
    ]


class Server:
    """The functions loaded so far, and one event loop for those that are `async def`."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def answer(self, request: Mapping[str, Any]) -> bytes:
        """Of {"value": …} or {"error": text, "failure": its kind}; "broken": the process should not be used again."""
        failure = Failure.EXCEPTION
        try:
            if request["kind"] == "load":
                function = self.functions[request["target"]] = load_function(request["target"])
                return marshal.dumps({"value": parameters_of(function)})
            result = self.functions[request["target"]](*request["args"], **request["kwargs"])
            if inspect.isawaitable(result):
                result = self.wait_for(result)
            failure = Failure.RESULT
            return marshal.dumps({"value": plain(result)})
        except BaseException as error:
            text = told(error)
            failure = failure_of(error, failure)
            broken = failure in (Failure.MEMORY, Failure.EXIT)
            return marshal.dumps({"error": text, "failure": str(failure), "broken": broken})

    def wait_for(self, result: Any) -> Any:
        """What an `async def` function returns. The loop stays, and its clients and sessions do."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)

        async def outcome() -> Any:
            return await result

        return self.loop.run_until_complete(outcome())


def failure_of(error: BaseException, otherwise: Failure) -> Failure:
    """What an exception of user code counts as; errors of ours that pass through it say so themselves."""
    own = getattr(error, "failure", None)
    if isinstance(own, Failure):
        return own
    if isinstance(error, MemoryError):
        return Failure.MEMORY
    return otherwise if isinstance(error, Exception | asyncio.CancelledError) else Failure.EXIT


def told(error: BaseException) -> str:
    """The traceback without the frames of ours, and of Python's imports, that came first; none where we complain, in words."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    ours = isinstance(getattr(error, "failure", None), Failure)  # says all; what it came from are a library's frames
    return "".join(traceback.format_exception(type(error), error, frames, chain=not ours))


def serve(channel: socket.socket) -> None:
    """Answer requests until the other end is gone."""
    server, stream, process = Server(), channel.makefile("rb"), os.getpid()
    while len(header := stream.read(LENGTH.size)) == LENGTH.size:
        request = pickle.loads(stream.read(*LENGTH.unpack(header)))
        reply = server.answer(request)
        if os.getpid() != process:  # user code forked, and the copy came back too
            os._exit(0)
        channel.sendall(LENGTH.pack(len(reply)) + reply)


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent's end of the pipe is closed.

    It works while user code holds the interpreter lock, and takes grandchildren along.
    PR_SET_PDEATHSIG spares those, and fires already when the *thread* that started a host ends.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # gone before the kernel was told
        os._exit(1)


def main(
    socket_fd: int, lifeline: int, memory_bytes: int, uid: int, *, serve: Callable[[socket.socket], None] = serve
) -> None:
    """Set limits and serve. Data is limited, not address space, of which torch reserves plenty."""
    die_with_parent(lifeline)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # where the whole machine runs short, the kernel is to take a host first
        Path("/proc/self/oom_score_adj").write_text("1000")
    confinement.limit_processes(PROCESSES, uid)
    channel = socket.socket(fileno=socket_fd)
    channel.set_inheritable(False)
    serve(channel)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
