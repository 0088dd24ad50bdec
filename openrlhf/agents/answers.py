"""What the engine answers to an agent, in vLLM's attribute names."""

from dataclasses import dataclass


class EngineRefusal(ValueError):
    """The engine does not serve such a request."""


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Of one sampled token, in nats."""

    logprob: float


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample, in vLLM's attribute names. `text` is without what ended it; `token_ids` have that."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What `Engine.generate` returns."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
