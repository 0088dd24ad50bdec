"""A reward server of the tests: answers as its path says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RewardServer(ThreadingHTTPServer):
    """Keeps what it was asked, in `bodies`; `url` is its address without a path.

    The reward of a sample is the number of letters "e" after its prompt.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, list[Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def reward_server() -> Iterator[RewardServer]:
    server = RewardServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        pairs = zip(body["query"], body["prompts"], strict=True)
        rewards = [query.removeprefix(prompt).count("e") for query, prompt in pairs]
        good = {"rewards": rewards, "extra_logs": {"letters": [len(q) for q in body["query"]]}}
        match self.path.strip("/"):
            case "scores":
                self._answer(200, good | {"scores": [0.25] * len(rewards)})
            case "busy_twice" if len(self.server.bodies) <= 2:
                self._answer(503, {"detail": "loading"})
            case "broken":
                self._answer(500, {"detail": "out of memory"})
            case "wrong_query":
                self._answer(422, {"detail": "field missing"})
            case "no_json":
                self._answer(200, "<html>")
            case "too_many":
                self._answer(200, {"rewards": [1.0, 2.0, 3.0]})
            case "not_finite":
                self._answer(200, '{"rewards": [NaN]}')
            case "slow":
                time.sleep(1)
                self._answer(200, good)
            case "huge":
                self._answer(200, {"rewards": [10**400]})
            case "hang":
                time.sleep(30)
            case "close":
                self.connection.close()
            case _:
                self._answer(200, good)

    def _answer(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
