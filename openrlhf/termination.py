"""SIGTERM and Ctrl-C: the process ends in order, with status 143 or 130, at a moment at which its
state can be saved.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

SAID = b"\nEnding when what has begun is done; Ctrl-C ends at once.\n"
ENDINGS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
HOLD = signal.SIGURG  # sent by `hold_main_thread`; ignored unless handled


def hold(*_: object) -> None:
    """Wait forever if the main thread is held. Signals are still handled."""
    if _Asked.held:
        threading.Event().wait()


def end_quietly(number: int, _: object) -> NoReturn:
    """Handle Ctrl-C before the command has begun its work: end at once, without a traceback."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


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


class _Asked:
    status = 0  # to end with; 0: nobody has asked
    wholes = 0  # `whole` blocks that are being run
    held = False  # the main thread, by `hold_main_thread`


@contextmanager
def in_order() -> Iterator[None]:
    """Make SIGTERM and Ctrl-C raise SystemExit in the block, at the end of any `whole`; a second
    Ctrl-C does not wait.

    A main thread that is held only records the request (`asked`): another thread ends the process.

    Ray's own handler of SIGTERM dumps a stack first. Signals that the shell made this process
    ignore stay ignored. Once asked to end, a process ignores further SIGTERMs, even after the
    block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def end(number: int, _: object) -> None:
        if (
            os.getpid() != own
        ):  # in a process that a library has forked, and which Ctrl-C reaches too
            return None if number == signal.SIGINT else os._exit(128 + number)
        _Asked.status = 128 + number
        hold()
        signal.signal(signal.SIGTERM, lambda *_: None)  # once is enough
        signal.signal(
            signal.SIGINT, signal.default_int_handler if signal.SIGINT in before else signal.SIG_IGN
        )
        with suppress(OSError):  # not `print`, which may not be interrupted by itself
            os.write(2, SAID * (os.environ.get("RANK", "0") == "0"))
        if not _Asked.wholes:
            raise SystemExit(_Asked.status)

    before = {
        each: signal.signal(each, end)
        for each in ENDINGS
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    before[HOLD] = signal.signal(HOLD, hold)
    _Asked.status = 0
    try:
        yield
    except SystemExit:
        if not _Asked.status:
            raise
        _report_end()
        raise SystemExit(
            _Asked.status
        ) from None  # a call of Ray turns the status that `end` raised into 1
    finally:
        if not _Asked.status:
            for each, handler in before.items():
                signal.signal(each, handler)


@contextmanager
def whole() -> Iterator[None]:
    """Finish the block before the process ends."""
    _Asked.wholes += 1
    try:
        yield
    finally:
        _Asked.wholes -= 1
    if _Asked.status and not _Asked.wholes:
        raise SystemExit(_Asked.status)


def asked() -> int:
    """The status with which the process has been asked to end, or 0."""
    return _Asked.status


def end_at_once() -> NoReturn:
    """End the process that has been asked to end, without waiting for its threads."""
    _report_end()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(_Asked.status)


def _report_end() -> None:
    with suppress(OSError):  # the reader of a pipe may have been terminated too
        print(f"\n{ENDINGS[signal.Signals(_Asked.status - 128)]}", file=sys.stderr, flush=True)


def hold_main_thread() -> None:
    """Stop the main thread forever at its next Python instruction, so that another thread can end
    the process.

    Do nothing if the process has been asked to end.
    """
    main = threading.main_thread().ident
    if not _Asked.status and main:
        _Asked.held = True
        signal.pthread_kill(main, HOLD)
