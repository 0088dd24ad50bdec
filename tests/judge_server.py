"""A fake OpenAI-compatible server whose models judge answers as the model names suggest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.http_double import DoubleServer, JSONHandler, serving


class JudgeServer(DoubleServer):
    """A server that records request bodies and API keys. `url` is the value for --judge.url."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = f"{self.root}/v1"


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    with serving(JudgeServer()) as server:
        yield server


def answers_in(asked: str) -> tuple[str, str]:
    """Return the two answers contained in a request to the judge."""
    a, b = (
        re.search(rf"<answer_{name}>\n(.*?)\n</answer_{name}>", asked, re.DOTALL) for name in "AB"
    )
    assert a and b
    return a[1], b[1]


class _Handler(JSONHandler):
    server: JudgeServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self.answer(405, {})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = self.body()
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
                self.answer(503, {"error": "loading"})
            case "broken":
                self.answer(500, {"error": "out of memory"})
            case "unknown":
                self.answer(404, {"error": "no such model"})
            case "silent":
                self.answer(200, {"choices": []})
            case _:
                self._say(better)

    def _say(self, text: str) -> None:
        self.answer(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})
