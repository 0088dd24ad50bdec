"""A fake reward server. The path of a request selects the server's behavior."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.http_double import DoubleServer, JSONHandler, serving


class RewardServer(DoubleServer):
    """A server that records `bodies`, `paths` and `authorizations`. `url` contains no path.

    The reward of a sample is how often the letter "e" occurs after the prompt.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.bodies: list[dict[str, list[Any]]] = []
        self.paths: list[str] = []
        self.authorizations: list[str | None] = []
        self.url = self.root
        # Requests to /together are answered once the barrier's number of requests has arrived.
        self.together = threading.Barrier(1)


@contextmanager
def reward_server() -> Iterator[RewardServer]:
    with serving(RewardServer()) as server:
        yield server


class _Handler(JSONHandler):
    server: RewardServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.body()
        self.server.bodies.append(body)
        pairs = zip(body["query"], body["prompts"], strict=True)
        rewards = [query.removeprefix(prompt).count("e") for query, prompt in pairs]
        good = {"rewards": rewards, "extra_logs": {"letters": [len(q) for q in body["query"]]}}
        self.server.paths.append(self.path)
        self.server.authorizations.append(self.headers["Authorization"])
        match self.path.partition("?")[0].strip("/"):
            case "scores":
                self.answer(200, good | {"scores": [0.25] * len(rewards)})
            case "busy_twice" if len(self.server.bodies) <= 2:
                self.answer(503, {"detail": "loading"})
            case "broken":
                self.answer(500, {"detail": "out of memory"})
            case "wrong_query":
                self.answer(422, {"detail": "field missing"})
            case "no_json":
                self.answer(200, "<html>")
            case "too_many":
                self.answer(200, {"rewards": [1.0, 2.0, 3.0]})
            case "not_finite":
                self.answer(200, '{"rewards": [NaN]}')
            case "together":
                self.server.together.wait(15)
                self.answer(200, good)
            case "huge":
                self.answer(200, {"rewards": [10**400]})
            case "hang":
                time.sleep(30)
            case "close":
                self.connection.close()
            case _:
                self.answer(200, good)
