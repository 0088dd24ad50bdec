"""An OpenAI-compatible server of the tests, whose models judge as their names say."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """Keeps what it was asked, in `bodies`, and the keys it was shown; `url` is what --judge.url takes."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def answers_in(asked: str) -> tuple[str, str]:
    """Both answers of a question to the judge."""
    a, b = (re.search(rf"<answer_{name}>\n(.*?)\n</answer_{name}>", asked, re.DOTALL) for name in "AB")
    assert a and b
    return a[1], b[1]


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self._answer(405, {})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.add(self.headers["Authorization"])
        a, b = answers_in(body["messages"][0]["content"])
        better = "A" if a.count("e") > b.count("e") else "B"
        match body["model"]:
            case "letters":
                self._say(better)
            case "digits":
                self._say("A" if sum(map(str.isdigit, a)) > sum(map(str.isdigit, b)) else "B")
            case "chatty":
                self._say(f"A is short. B is not.\n\n**Answer: {better}**\n")
            case "first":
                self._say("A")
            case "undecided":
                self._say("Both A and B are fine.")
            case "busy_once" if len(self.server.bodies) <= 1:
                self._answer(503, {"error": "loading"})
            case "broken":
                self._answer(500, {"error": "out of memory"})
            case "unknown":
                self._answer(404, {"error": "no such model"})
            case "silent":
                self._answer(200, {"choices": []})
            case _:
                self._say(better)

    def _say(self, text: str) -> None:
        self._answer(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
