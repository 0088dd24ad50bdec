"""A judge: a language model on an OpenAI-compatible server that compares two answers."""

import asyncio
import re
from pathlib import Path

from jinja2 import Template

from openrlhf.config.evaluation import JudgeConfig
from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.rewards.remote_engines import RemoteEngine

QUESTION = Template(Path(__file__).with_suffix(".jinja").read_text(encoding="utf-8"))


class NoVerdict(ValueError):
    """Error for a judge's reply that does not state which answer is better."""

    failure = Failure.RESULT


class Judge:
    """A judge that compares each pair of answers in both orders.

    If the judge prefers a position rather than an answer, the result is a tie.
    """

    def __init__(self, judge: JudgeConfig, reward: RuleConfig) -> None:
        """Connect to the server. The API key comes from OPENAI_API_KEY."""
        assert judge.url
        base = judge.url.rstrip("/").removesuffix("/chat/completions")
        self.engine = RemoteEngine(
            base, reward, model=judge.model, kind="judge", flag="--judge.url"
        )
        self.max_tokens = judge.max_tokens

    async def compare(self, message: str, first: str, second: str) -> float:
        """Return 1.0 if the first answer to a message wins, 0.0 if it loses, and 0.5 for a tie.

        Raises ServerError or NoVerdict.
        """
        first_wins, second_wins = await asyncio.gather(
            self._prefers_a(message, first, second), self._prefers_a(message, second, first)
        )
        if first_wins == second_wins:
            return 0.5
        return float(first_wins)

    async def _prefers_a(self, message: str, a: str, b: str) -> bool:
        messages = [{"role": "user", "content": QUESTION.render(message=message, a=a, b=b)}]
        reply = await self.engine.chat(messages, temperature=0, max_tokens=self.max_tokens)
        return read_verdict(reply) == "A"


def read_verdict(text: str) -> str:
    """Return the verdict, A or B, from the last line of the judge's reply.

    Raises NoVerdict, quoting the reply.
    """
    last = text.strip().rpartition("\n")[2]
    found = re.fullmatch(r"\W*(?:(?:answer|verdict)\W+)?([AB])\W*", last, re.IGNORECASE)
    if not found:
        raise NoVerdict(f"the last line of the judge's reply is neither A nor B: {text[-200:]!r}")
    return found[1].upper()
