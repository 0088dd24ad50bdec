"""SIGTERM: the process ends in order, with status 143, at a moment at which its state can be saved."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STATUS = 128 + signal.SIGTERM


class _Asked:
    at_all = False
    wholes = 0  # `whole` blocks that are being run


@contextmanager
def in_order() -> Iterator[None]:
    """Within it, SIGTERM raises SystemExit, or waits for the end of `whole`. Ray's own handler dumps a stack first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != own:  # in a process that a library has forked
            os._exit(STATUS)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        _Asked.at_all = True
        if not _Asked.wholes:
            raise SystemExit(STATUS)

    before = signal.signal(signal.SIGTERM, end)
    _Asked.at_all = False
    try:
        yield
    except SystemExit:
        if not _Asked.at_all:
            raise
        with suppress(OSError):  # the reader of a pipe may have been terminated too
            print("\nterminated", file=sys.stderr)
        raise SystemExit(STATUS) from None  # a call of Ray turns the status that `end` raised into 1
    finally:
        if not _Asked.at_all:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def whole() -> Iterator[None]:
    """What is within it is done to its end before the process ends."""
    _Asked.wholes += 1
    try:
        yield
    finally:
        _Asked.wholes -= 1
    if _Asked.at_all and not _Asked.wholes:
        raise SystemExit(STATUS)


def asked() -> bool:
    """Whether the process has been asked to end."""
    return _Asked.at_all
