"""A watch over the Ray processes that a command needs: the control store, and the raylet of the command's machine.

Neither death raises an error. Ray ends the process of the command at its next use of the object store after the raylet
has died, and a minute after the control store has died; until then some calls hang. So the command has to see the
death first.

    RayWatch
      └─ one thread per process: holds a connection, which the kernel closes when the process dies; connects again,
         and calls `on_loss` once if nothing has answered for the process's `patience_s`
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.2  # between two attempts to connect


@dataclass(frozen=True, kw_only=True)
class RayProcess:
    """A process of Ray. `own`: of a Ray that this process has started. It may start again within `patience_s`."""

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
    """Calls `on_loss` once, in a thread, when one of the processes has died. Nothing must use Ray from then on."""

    def __init__(self, processes: Sequence[RayProcess], on_loss: Callable[[LostRay], None]) -> None:
        self._on_loss = on_loss
        self._changing = threading.Lock()
        self._closed = threading.Event()
        self._lost = False
        for process in processes:
            threading.Thread(target=self._watch, args=(process,), name="ray-watch", daemon=True).start()

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
            with suppress(OSError), socket.create_connection(process.address, timeout=CONNECT_TIMEOUT_S) as connection:
                connection.settimeout(None)
                while connection.recv(4096):
                    pass
                answered = time.monotonic()
                continue  # gRPC closes a silent connection now and then
            if time.monotonic() - answered >= process.patience_s:
                return self._report(process)
            time.sleep(RETRY_S)

    def _report(self, process: RayProcess) -> None:
        with self._changing:
            first = not self._lost and not self._closed.is_set()
            self._lost = self._lost or first
        if first:
            self._on_loss(LostRay(process.name, process.own))
