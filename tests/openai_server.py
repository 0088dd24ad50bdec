"""A fake OpenAI-compatible server whose models behave as the model names suggest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.http_double import DoubleServer, JSONHandler, serving


class OpenAIServer(DoubleServer):
    """A server that records paths and bodies in `asked`, and API keys in `keys`.

    `url` is the server's base URL.
    The reply to a chat is its last message in capitals; the completion of a prompt is the prompt's
    length. `models` is the list of models. The log-probability of token 7 is -0.7, and its text is
    `texts(7)`. `table` maps a prompt to the log-probabilities of all tokens at each position.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.asked: list[tuple[str, dict[str, Any] | None]] = []
        self.keys: set[str | None] = set()
        self.models: list[dict[str, Any]] = [{"id": "loud"}]
        self.texts: Callable[[int], str | None] = str
        self.table: Callable[[list[int]], list[list[float]]] | None = None
        self.url = f"{self.root}/v1"


@contextmanager
def openai_server() -> Iterator[OpenAIServer]:
    with serving(OpenAIServer()) as server:
        yield server


class _Handler(JSONHandler):
    server: OpenAIServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self.answer(405, {})

    def do_GET(self) -> None:
        self.server.asked.append((self.path, None))
        self.answer(
            200, {"data": self.server.models}
        ) if self.path == "/v1/models" else self.answer(404, {})

    def do_POST(self) -> None:
        body = self.body()
        self.server.asked.append((self.path, body))
        self.server.keys.add(self.headers["Authorization"])
        match body["model"]:
            case "broken":
                self.answer(500, {"error": "out of memory"})
            case "busy_once" if len(self.server.asked) == 1:
                self.answer(503, {"error": "loading"})
            case "slow":
                time.sleep(30)
            case "unknown":
                self.answer(404, {"error": "no such model"})
            case "no_json":
                self.answer(200, "<html>")
            case "wrong_json":
                self.answer(200, {"choices": []})
            case "silent":
                self.answer(200, {"choices": [{"message": {"content": None}, "text": None}]})
            case _ if self.path == "/v1/chat/completions":
                text = body["messages"][-1]["content"].upper()
                self.answer(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})
            case _ if self.path == "/v1/completions":
                answer: dict[str, Any] = {"text": str(len(body["prompt"]))}
                if "prompt_logprobs" in body:
                    answer["prompt_logprobs"] = [
                        None,
                        *self._judged(body["prompt"], body["prompt_logprobs"]),
                    ]
                self.answer(200, {"choices": [answer]})
            case _:
                self.answer(404, {"error": self.path})

    def _judged(self, tokens: list[int], best: int) -> list[dict[str, Any]]:
        """Return an entry with log-probabilities for each token after the first."""
        if not self.server.table:
            return [self._said({token: -token / 10}, [token]) for token in tokens[1:]]
        found = []
        for token, logprobs in zip(tokens[1:], self.server.table(tokens), strict=False):
            ranked = sorted(range(len(logprobs)), key=lambda each: -logprobs[each])
            found.append(self._said(logprobs, ranked, {*ranked[:best], token}))
        return found

    def _said(
        self, logprobs: Any, ranked: list[int], of: Iterable[int] | None = None
    ) -> dict[str, Any]:
        return {
            str(token): {
                "logprob": logprobs[token],
                "rank": ranked.index(token) + 1,
                "decoded_token": self.server.texts(token),
            }
            for token in of or ranked
        }
