"""Monitors the Ray processes that a command needs: the control store and the local raylet.

Ray does not report the death of either process. Ray ends the command's process a minute after the
control store has died, or when the command uses the object store after the raylet has died; until
then, some calls hang. The command therefore has to detect the death first.

    RayWatch
      └─ one thread per process: holds a connection, which the kernel closes when the process dies;
         reconnects whenever the connection ends, and calls `on_loss` once if no attempt has
         succeeded for `patience_s`
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

CONNECT_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.02
# A machine that crashes does not close its connections.
# With these options the kernel drops a connection after 5 + 3 * 2 seconds of silence.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True, kw_only=True)
class RayProcess:
    """A Ray process to watch."""

    name: str
    address: tuple[str, int]
    own: bool  # True if this process started Ray
    patience_s: float = 0.0  # time that a restart of the process may take

    @property
    def death(self) -> str:
        """The sentence that reports the death of the process."""
        return f"Ray's {self.name} has died."


class RayWatch:
    """A watch that calls `on_loss` once, in a thread, when one of the processes dies.

    After the call, Ray must not be used.
    """

    def __init__(
        self, processes: Sequence[RayProcess], on_loss: Callable[[RayProcess], None]
    ) -> None:
        self._on_loss = on_loss
        self._changing = threading.Lock()
        self._closed = threading.Event()
        self._lost = False
        for process in processes:
            thread = threading.Thread(
                target=self._watch, args=(process,), name="ray-watch", daemon=True
            )
            thread.start()

    def close(self) -> None:
        """Stop watching. Never returns after a loss, because `on_loss` ends the process."""
        with self._changing:
            self._closed.set()
            lost = self._lost
        if lost:
            threading.Event().wait()

    def _watch(self, process: RayProcess) -> None:
        last_connected = time.monotonic()
        while not self._closed.is_set():
            started = time.monotonic()
            if _hold_connection(process.address):
                # How the connection ended is irrelevant. Only failed attempts to reconnect count.
                last_connected = time.monotonic()
            elif time.monotonic() - last_connected >= process.patience_s:
                self._report(process)
                return
            if time.monotonic() - started < RETRY_DELAY_S:
                time.sleep(RETRY_DELAY_S)

    def _report(self, process: RayProcess) -> None:
        with self._changing:
            if self._lost or self._closed.is_set():
                return
            self._lost = True
        self._on_loss(process)


def _hold_connection(address: tuple[str, int]) -> bool:
    """Connect, and return True when the connection has ended; return False if nothing answers.

    A connection may end while the process is alive: gRPC occasionally closes idle connections, and
    networks reset connections.
    """
    try:
        connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    except ConnectionResetError:  # the process accepted the connection and immediately reset it
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
