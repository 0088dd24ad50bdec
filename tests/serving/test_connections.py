"""Tests that clients that connect but never complete a request do not block the server.

Other clients still get responses, and idle connections are closed.
"""

from __future__ import annotations

import http.client
import json
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
import uvicorn

from openrlhf.serving.batcher import Batcher, Texts
from openrlhf.serving.connections import MAX_CONNECTIONS, Connection, raise_connection_limit
from openrlhf.serving.server import listen, reward_app

HALF_REQUESTS = [
    b"",
    b"POST /get_re",
    b"POST /get_reward HTTP/1.1\r\nhost: a\r\nx: ",
    b"POST /get_reward HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{",
]
HALVES = ["nothing", "half a line", "half of the headers", "half a body"]
EACH_HALF_REQUEST = pytest.mark.parametrize("start", HALF_REQUESTS, ids=HALVES)
TOO_LARGE = (
    b"POST /get_reward HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n" + b" " * 70_000
)


class ShortTimeout(Connection):
    """A connection with a short request timeout."""

    request_timeout_s = 0.3


class _Server(uvicorn.Server):
    """A server that sets an event when it has started."""

    ready: threading.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def serving(*, kind: type[Connection] = Connection, limit: int = 9) -> Iterator[int]:
    """Run a server with at most `limit` connections and yield its port."""

    def lengths(texts: Texts) -> list[float]:
        return [float(len(text)) for text in texts]

    def characters(texts: list[str]) -> Texts:
        return [list(map(ord, text)) for text in texts]

    app = reward_app(
        characters, Batcher(lengths, max_tokens=100, max_wait=0.0), max_texts=4, max_mib=0.05
    )
    settings = uvicorn.Config(
        app, http=kind, log_level="warning", limit_concurrency=limit, timeout_graceful_shutdown=5
    )
    server = _Server(settings)
    server.ready = threading.Event()
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert server.ready.wait(60)
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join(60)


def ask(port: int) -> int:
    """Send a request on a new connection and return the response status."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("POST", "/get_reward", body=json.dumps({"query": ["text"]}))
    try:
        return client.getresponse().status
    finally:
        client.close()


def half_request(port: int, start: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(start)
    return client


def is_closed(client: socket.socket) -> bool:
    """Return whether the server has closed the connection, possibly after sending a response."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@EACH_HALF_REQUEST
def test_requests_get_responses_while_many_clients_never_complete_theirs(start: bytes) -> None:
    with serving() as port, ExitStack() as clients:
        for _ in range(40):
            clients.enter_context(half_request(port, start))
            assert ask(port) == 200


@EACH_HALF_REQUEST
def test_request_gets_a_response_after_a_burst_of_clients_that_never_complete_theirs(
    start: bytes,
) -> None:
    with serving() as port, ExitStack() as clients:
        for _ in range(40):
            for _ in range(12):
                clients.enter_context(half_request(port, start))
            assert ask(port) == 200


@pytest.mark.parametrize(
    "start",
    [*HALF_REQUESTS, TOO_LARGE],
    ids=[*HALVES, "too large"],
)
def test_connection_is_closed_if_its_request_is_incomplete_at_the_timeout(
    start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        serving(kind=ShortTimeout) as port,
        half_request(port, start) as client,
    ):
        assert is_closed(client)
    assert not caplog.records


def test_sending_one_byte_at_a_time_does_not_extend_the_timeout() -> None:
    with serving(kind=ShortTimeout) as port, half_request(port, HALF_REQUESTS[3]) as client:
        client.settimeout(0.02)
        with suppress(ConnectionError):
            while not is_closed(client):
                client.sendall(b" ")


def test_connection_is_kept_open_for_further_requests() -> None:
    body = json.dumps({"query": ["text"]})
    with serving() as port, httpx.Client() as client:
        sources: set[object] = set()
        for _ in range(3):
            answer = client.post(f"http://127.0.0.1:{port}/get_reward", content=body)
            assert answer.json()["rewards"] == [4.0]
            sources.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(sources) == 1


def test_open_file_limit_is_raised_for_the_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        allowed = raise_connection_limit()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert allowed < files <= hard
        assert allowed == MAX_CONNECTIONS or files == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
