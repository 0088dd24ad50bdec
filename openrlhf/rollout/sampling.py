"""What is asked of an engine, and what it answers. Plain data: user processes import it at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class SamplingParams:
    """How a sample is drawn, in vLLM's attribute names. Assignable: agents change it between turns."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: what the context leaves
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = False
    logprobs: int | None = None  # for agents; an engine always returns the sampled tokens'


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sample. The lists have one entry per sampled token, an end or stop token included.

    `logprobs` are those of the distribution sampled from: after temperature, top-k, top-p, min-p.
    `stop_reason` is the stop token or stop string of the parameters that ended it, if one did.
    """

    tokens: list[int]
    logprobs: list[float]  # nats
    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: int | str | None
    weight_versions: tuple[int, ...]  # those that sampled its tokens, oldest first
    text: str | None = None  # only where stop strings were asked for
    cached_tokens: int = 0  # of the prompt: found in the engine's prefix cache, and not computed
    seconds: float = 0.0  # from the request to the last token, waiting included
