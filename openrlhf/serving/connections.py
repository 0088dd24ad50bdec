"""Connections of the reward server, limited in number and in the time to send a request."""

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 4096  # maximum number of concurrent connections
OTHER_OPEN_FILES = 128  # open files reserved for other purposes


def raise_connection_limit() -> int:
    """Raise this process's open file limit to allow MAX_CONNECTIONS connections.

    Returns the number of connections that the resulting limit allows.
    """
    wanted = MAX_CONNECTIONS + OTHER_OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_CONNECTIONS
    allowed = wanted
    if hard != resource.RLIM_INFINITY:
        allowed = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - OTHER_OPEN_FILES)


class Connection(H11Protocol):
    """A connection that is closed if its client takes too long to send a request.

    The whole request, headers and body, must arrive within `request_timeout_s`. At the connection
    limit, a new connection replaces the one that has waited longest for its client. Connections
    waiting for a response are never dropped. If all connections are waiting for a response, new
    requests get status 503.
    """

    request_timeout_s: ClassVar[float] = 60.0
    _deadline: asyncio.TimerHandle | None = None

    @property
    def waits_for_client(self) -> bool:
        """False while a complete request is waiting for its response."""
        request = self.cycle
        return request is None or request.more_body or request.response_complete

    def connection_made(self, transport: Any) -> None:
        """Make room for the connection and start its timer."""
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) + 1 >= limit:
            self._make_room()
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._clear_deadline()

    def data_received(self, data: bytes) -> None:
        """Stop the timer once a request is complete."""
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        """Start the timer for the next request, or for the rest of a request that was answered
        early."""
        super().on_response_complete()
        self._set_deadline()

    def _set_deadline(self) -> None:
        if not self.waits_for_client:
            self._clear_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.request_timeout_s, self._drop)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        deadlines: dict[Connection, float] = {}
        for other in self.connections:
            if isinstance(other, Connection) and other._deadline is not None:
                deadlines[other] = other._deadline.when()
        if deadlines:
            waits_longest = min(deadlines, key=deadlines.__getitem__)
            waits_longest._drop()

    def _drop(self) -> None:
        self._clear_deadline()
        self.connections.discard(self)
        self.transport.abort()
