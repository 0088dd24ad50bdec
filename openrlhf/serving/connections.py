"""Limits the reward server's connections and the time that a client may take to send a request."""

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 4096  # maximum number of concurrent connections
OTHER_OPEN_FILES = 128  # open files reserved for other purposes


def raise_connection_limit() -> int:
    """Raise this process's open file limit to allow MAX_CONNECTIONS connections.

    Returns the number of connections allowed by the resulting limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, hard - OTHER_OPEN_FILES))


class Connection(H11Protocol):
    """A connection that is closed if its client takes too long to send a request.

    The entire request, both headers and body, must arrive within `request_timeout_s`. At the
    connection limit, a new connection replaces the connection whose client has been idle the
    longest. Connections waiting for a response are never dropped. If all connections are waiting
    for a response, new requests get status 503.
    """

    request_timeout_s: ClassVar[float] = 60.0
    deadline: asyncio.TimerHandle | None = None  # set while the connection waits for its client
    last_tasks: frozenset[asyncio.Task[None]] = frozenset()  # task of the newest request, if any

    def connection_made(self, transport: Any) -> None:
        """Make room for the connection and start its timer."""
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) + 1 >= limit:
            others: Any = self.connections
            waiting = [other for other in others if other.deadline]
            if waiting:
                min(waiting, key=lambda other: other.deadline.when()).drop()
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

    def handle_events(self) -> None:
        """Start the task of each request whose headers are complete, and remember the task."""
        tasks = self.tasks.copy()
        super().handle_events()
        if started := self.tasks - tasks:
            self.last_tasks = frozenset(started)

    def on_response_complete(self) -> None:
        """Start the timer for the next request, or for the rest of a request answered early."""
        super().on_response_complete()
        self._set_deadline()

    def _set_deadline(self) -> None:
        request = self.cycle
        if request and not request.more_body and not request.response_complete:
            self._clear_deadline()  # a complete request is waiting for its response
        elif self.deadline is None and not self.transport.is_closing():
            self.deadline = self.loop.call_later(self.request_timeout_s, self.drop)

    def _clear_deadline(self) -> None:
        if self.deadline:
            self.deadline.cancel()
            self.deadline = None

    def drop(self) -> None:
        """Close the connection without a response.

        Its task ends some iterations of the event loop later. Until then, it must not count towards
        the limit on concurrent requests.
        """
        self._clear_deadline()
        self.connections.discard(self)
        self.tasks.difference_update(self.last_tasks)
        self.transport.abort()
