"""Orderly exit on SIGTERM (status 143) and Ctrl-C (status 130).

The process stops only when its state is consistent, after all open `deferred` blocks.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from openrlhf.reporting import alert, is_first

STOPPING = b"\nStopping after the current step. Press Ctrl-C again to stop immediately.\n"
ENDINGS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}  # signal → final message
HOLD_SIGNAL = signal.SIGURG  # sent by `hold_main_thread`; ignored by default


class _State:
    status = 0  # exit status of a requested exit; 0 if no exit was requested
    open_deferrals = 0  # number of open `deferred` blocks
    held = False  # True once `hold_main_thread` has been called


def end_quietly(number: int, _: object) -> NoReturn:
    """Exit at once without a traceback. Handles Ctrl-C before a command starts its work."""
    _write_on_rank_0(b"\ninterrupted\n")
    os._exit(128 + number)


def _write_on_rank_0(message: bytes) -> None:
    """Write to stderr on rank 0. Unlike `print`, this function is safe in a signal handler."""
    if is_first():
        with suppress(OSError):
            os.write(2, message)


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C until the block exits, instead of calling `end_quietly`."""
    if signal.getsignal(signal.SIGINT) is not end_quietly:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, end_quietly)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and Ctrl-C until the block exits.

    `deferred` blocks delay the exit. A Ctrl-C after the first signal raises KeyboardInterrupt at
    once. Further SIGTERMs are ignored, even after the block. Signals that the shell has set to be
    ignored stay ignored. After `hold_main_thread`, the handler only records the request (see
    `asked`); the thread that called `hold_main_thread` ends the process. Outside the main thread,
    this context manager does nothing.

    Ray's own SIGTERM handler would first print a stack trace.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own_pid = os.getpid()
    handlers_before: dict[signal.Signals, Any] = {}

    def end(number: int, _: object) -> None:
        if os.getpid() != own_pid:  # this process was forked by a library
            if number == signal.SIGINT:
                return  # the parent also receives Ctrl-C and handles it
            os._exit(128 + number)
        _State.status = 128 + number
        _wait_if_held()
        signal.signal(signal.SIGTERM, lambda *_: None)
        if signal.SIGINT in handlers_before:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _write_on_rank_0(STOPPING)
        if not _State.open_deferrals:
            raise SystemExit(_State.status)

    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, end)
    handlers_before[HOLD_SIGNAL] = signal.signal(HOLD_SIGNAL, _wait_if_held)
    _State.status = 0
    try:
        yield
    except SystemExit:
        if not _State.status:
            raise
        _report_end()
        # Raise a new SystemExit: a Ray call may have changed the status of the original one.
        raise SystemExit(_State.status) from None
    finally:
        if not _State.status:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)


def _wait_if_held(*_: object) -> None:
    """Wait forever if the main thread is held; signals are still handled."""
    if _State.held:
        threading.Event().wait()


@contextmanager
def deferred() -> Iterator[None]:
    """Delay termination until the block has finished."""
    _State.open_deferrals += 1
    try:
        yield
    finally:
        _State.open_deferrals -= 1
    if _State.status and not _State.open_deferrals:
        raise SystemExit(_State.status)


def asked() -> int:
    """Return the exit status of a requested exit, or 0 if no exit was requested."""
    return _State.status


def end_at_once() -> NoReturn:
    """Exit a process that has been asked to exit, without waiting for its threads."""
    _report_end()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(_State.status)


def _report_end() -> None:
    ending = ENDINGS[signal.Signals(_State.status - 128)]
    with suppress(OSError):  # the pipe's reader may also have been terminated
        alert(f"\n{ending}")


def hold_main_thread() -> None:
    """Block the main thread forever at its next Python instruction.

    Another thread can then exit the process. Does nothing if the process has already been asked to
    exit.
    """
    main = threading.main_thread().ident
    if not _State.status and main:
        _State.held = True
        signal.pthread_kill(main, HOLD_SIGNAL)
