"""Monitoring of the Ray processes that a command needs: the control store, and the raylet of the
command's machine.

Neither death raises an error. Ray ends the process of the command at its next use of the object
store after the raylet has died, and a minute after the control store has died; until then some
calls hang. So the command has to detect the death first.

    RayWatch
      └─ one thread per process: holds a connection, which the kernel closes when the process dies; connects again
         whenever the connection ends, and calls `on_loss` once if no attempt has succeeded for `patience_s`
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.02  # between two attempts to connect
# A lost machine does not close its connections. The kernel drops a connection after 5 + 3 * 2
# seconds of silence.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True, kw_only=True)
class RayProcess:
    """A process of Ray. `own`: of a Ray that this process has started. It may start again within
    `patience_s`.
    """

    name: str
    address: tuple[str, int]
    own: bool
    patience_s: float = 0.0


@dataclass(frozen=True)
class LostRay:
    """A Ray process that has died. `own`: it belonged to a Ray that this process has started."""

    name: str
    own: bool

    def __str__(self) -> str:
        return f"Ray's {self.name} has died."


class RayWatch:
    """Calls `on_loss` once, in a thread, when one of the processes has died. Nothing must use Ray
    from then on.
    """

    def __init__(self, processes: Sequence[RayProcess], on_loss: Callable[[LostRay], None]) -> None:
        self._on_loss = on_loss
        self._changing = threading.Lock()
        self._closed = threading.Event()
        self._lost = False
        for process in processes:
            threading.Thread(
                target=self._watch, args=(process,), name="ray-watch", daemon=True
            ).start()

    def close(self) -> None:
        """Stop watching. After a loss, never return: `on_loss` ends the process."""
        with self._changing:
            self._closed.set()
            lost = self._lost
        if lost:
            threading.Event().wait()

    def _watch(self, process: RayProcess) -> None:
        answered = time.monotonic()
        while not self._closed.is_set():
            began = time.monotonic()
            if _hold_connection(process.address):
                answered = (
                    time.monotonic()
                )  # however the connection has ended: only failed attempts count
            elif time.monotonic() - answered >= process.patience_s:
                return self._report(process)
            if time.monotonic() - began < RETRY_S:
                time.sleep(RETRY_S)

    def _report(self, process: RayProcess) -> None:
        with self._changing:
            first = not self._lost and not self._closed.is_set()
            self._lost = self._lost or first
        if first:
            self._on_loss(LostRay(process.name, process.own))


def _hold_connection(address: tuple[str, int]) -> bool:
    """Connect, and return True when the connection has ended. Return False if nothing answers.

    A connection may end without a death: gRPC closes a silent one now and then, and networks reset
    some.
    """
    try:
        connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    except ConnectionResetError:  # right after the process had accepted it
        return True
    except OSError:
        return False
    with connection, suppress(OSError):
        for option in KEEPALIVE:
            connection.setsockopt(*option)
        connection.settimeout(None)
        while connection.recv(4096):
            pass
    return True
