"""Common parts of the fake HTTP servers used in tests."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound="DoubleServer")


class DoubleServer(ThreadingHTTPServer):
    """A server on a free port. `root` is the server's URL without a path."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[JSONHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.root = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors from clients that closed their connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Run the server until the block exits."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class JSONHandler(BaseHTTPRequestHandler):
    """A handler that reads and writes JSON, except that a string is sent unchanged."""

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
