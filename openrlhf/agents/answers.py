"""What the engine answers to an agent, in vLLM's attribute names."""

from dataclasses import dataclass


class EngineRefusal(ValueError):
    """The engine does not serve such a request."""


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Of one sampled token, in nats."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample, in vLLM's attribute names. `text` is without what ended it; `token_ids` have
    that.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None

    def is_cut(self, prompt_length: int, max_length: int, max_new_tokens: int | None) -> bool:
        """Return whether a limit of the run cut the sample: the room after the prompt, or the
        length of a turn.

        A sample that reached a lower limit of the request itself is complete.
        """
        room = max_length - prompt_length
        most = min(room, max_new_tokens or room)
        return self.finish_reason == "length" and len(self.token_ids) >= most


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What `Engine.generate` returns."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
