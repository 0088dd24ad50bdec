"""A language model that says which of two answers is better, behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from openrlhf.rewards.servers import HTTPServers, ServerError
from openrlhf.trajectory import Failure

QUESTION = """\
Below are a message and two answers to it, A and B. Decide which answer is better: more correct, more helpful and more to the \
point. Neither the order of the answers nor their length is a reason.

<message>
{message}
</message>

<answer_A>
{a}
</answer_A>

<answer_B>
{b}
</answer_B>

End with a line that holds one letter and nothing else: A if answer A is better, B if answer B is better."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which of two answers won: 1.0 the first, 0.0 the second, 0.5 neither; or the error that stands in its place."""

    win: float | None = None
    error: str | None = None
    failure: Failure | None = None


class Judge(HTTPServers):
    """Asks for each pair in both orders: a judge that prefers a place rather than an answer calls it a tie."""

    def __init__(
        self, url: str, model: str, *, max_tokens: int, timeout: float, retries: int, key: str | None = None
    ) -> None:
        """`url` is the server's base, such as http://host:8000/v1; `key` goes with every request."""
        completions = f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        super().__init__([completions], timeout=timeout, retries=retries, kind="judge", flag="--judge.url", key=key)
        self.model, self.max_tokens = model, max_tokens

    async def compare(self, message: str, first: str, second: str) -> Verdict:
        """Which of two answers to a message is better."""
        try:
            won, lost = await asyncio.gather(
                self._prefers_a(message, first, second), self._prefers_a(message, second, first)
            )
            return Verdict(win=(won + 1 - lost) / 2)
        except ServerError as error:
            return Verdict(error=str(error), failure=Failure.SERVER)
        except (TypeError, ValueError) as error:
            return Verdict(error=f"judge: {error}", failure=Failure.RESULT)

    async def _prefers_a(self, message: str, a: str, b: str) -> bool:
        parts = {"message": message, "a": a, "b": b}
        # One pass: an answer may hold {b} itself.
        asked = re.sub(r"\{(message|a|b)\}", lambda place: parts[place[1]], QUESTION)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        return read_verdict(await self.ask(body)) == "A"


def read_verdict(answered: Any) -> str:
    """A or B, from the last line of a chat completion. Raises ValueError that says what was answered instead."""
    try:
        text = answered["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"the server sent no chat completion: {str(answered)[:200]!r}") from None
    last = text.strip().rpartition("\n")[2] if isinstance(text, str) else ""
    found = re.fullmatch(r"\W*(?:(?:answer|verdict)\W+)?([AB])\W*", last, re.IGNORECASE)
    if not found:
        raise ValueError(f"its last line is neither A nor B: {str(text)[-200:]!r}")
    return found[1].upper()
