"""Orderly exit on SIGTERM (status 143) and Ctrl-C (status 130).

The process stops at a point where its state can be saved: after the running `whole` blocks.
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
ENDINGS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}  # signal → last word
HOLD_SIGNAL = signal.SIGURG  # sent by `hold_main_thread`; ignored by default


class _State:
    status = 0  # the exit status of a requested exit; 0: no exit was requested
    wholes = 0  # number of open `whole` blocks
    held = False  # True once `hold_main_thread` has been called


def end_quietly(number: int, _: object) -> NoReturn:
    """Exit at once without a traceback: the handler of Ctrl-C before a command starts its work."""
    _write_on_rank_0(b"\ninterrupted\n")
    os._exit(128 + number)


def _write_on_rank_0(message: bytes) -> None:
    """Write to stderr. Unlike `print`, a signal handler may call this function."""
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
def in_order() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and Ctrl-C until the block exits, deferred while a `whole` runs.

    A Ctrl-C after the first signal raises KeyboardInterrupt at once. Further SIGTERMs are ignored,
    even after the block. Signals that the shell made this process ignore stay ignored. A held main
    thread only records the request (`asked`): another thread ends the process. The block does
    nothing if it runs in another thread than the main thread.

    Ray's own handler of SIGTERM would dump a stack first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own_pid = os.getpid()
    handlers_before: dict[signal.Signals, Any] = {}

    def end(number: int, _: object) -> None:
        if os.getpid() != own_pid:  # forked by a library
            if number == signal.SIGINT:
                return  # Ctrl-C reaches the parent too, which decides
            os._exit(128 + number)
        _State.status = 128 + number
        _wait_if_held()
        signal.signal(signal.SIGTERM, lambda *_: None)
        if signal.SIGINT in handlers_before:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _write_on_rank_0(STOPPING)
        if not _State.wholes:
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
        # Not the exception of `end`: a call of Ray may have turned its status into 1.
        raise SystemExit(_State.status) from None
    finally:
        if not _State.status:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)


def _wait_if_held(*_: object) -> None:
    """Wait forever if the main thread is held. Signals are still handled."""
    if _State.held:
        threading.Event().wait()


@contextmanager
def whole() -> Iterator[None]:
    """Delay termination until the block has finished."""
    _State.wholes += 1
    try:
        yield
    finally:
        _State.wholes -= 1
    if _State.status and not _State.wholes:
        raise SystemExit(_State.status)


def asked() -> int:
    """Return the exit status if the process has been asked to end, otherwise 0."""
    return _State.status


def end_at_once() -> NoReturn:
    """End a process that has been asked to end, without waiting for its threads."""
    _report_end()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(_State.status)


def _report_end() -> None:
    ending = ENDINGS[signal.Signals(_State.status - 128)]
    with suppress(OSError):  # the reader of a pipe may have been terminated too
        alert(f"\n{ending}")


def hold_main_thread() -> None:
    """Stop the main thread at its next Python instruction, forever.

    Another thread can then end the process. Does nothing if the process has been asked to end.
    """
    main = threading.main_thread().ident
    if not _State.status and main:
        _State.held = True
        signal.pthread_kill(main, HOLD_SIGNAL)
