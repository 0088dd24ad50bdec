"""The engine's responses to an agent, with vLLM's attribute names."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass


def packed(tokens: Iterable[int]) -> bytes:
    """Return token ids as bytes, which take about a ninth of the memory of a list."""
    return array("i", tokens).tobytes()


def unpacked(data: bytes) -> list[int]:
    """Return the token ids in the result of `packed`."""
    return array("i", data).tolist()


class EngineRefusal(ValueError):
    """An error for a request that the engine rejects."""


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """The log-probability of one sampled token, in nats."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample.

    `token_ids` includes the token or stop string that ended the sample; `text` does not.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None

    def is_cut(self, prompt_length: int, max_length: int, max_new_tokens: int | None) -> bool:
        """Return whether a limit of the run (context length, tokens per turn) truncated the sample.

        A sample does not count if the request itself set a lower limit that truncated the sample.
        """
        room = max_length - prompt_length
        limit = min(room, max_new_tokens or room)
        return self.finish_reason == "length" and len(self.token_ids) >= limit


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The return value of `Engine.generate`."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
