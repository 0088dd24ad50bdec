"""Requests to an engine, and the engine's responses.

Requests and responses are plain data, so that user processes can import this module quickly.
"""

from dataclasses import dataclass


@dataclass(kw_only=True)
class SamplingParams:
    """The parameters for one sample, with vLLM's attribute names.

    Attributes can be assigned, because agents change them between turns.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None for no limit below the context length
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = False
    # Used only by agents: engines always return the log-probabilities of the sampled tokens.
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sample.

    The lists have one entry per sampled token, including a stop token. `logprobs` refer to the
    sampling distribution, after temperature, top-k, top-p and min-p. `stop_reason` is the stop
    token or stop string that ended the sample, or None if the parameters do not list it.
    """

    tokens: list[int]
    logprobs: list[float]  # nats
    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: int | str | None = None
    weight_versions: tuple[int, ...] = ()  # versions of the weights that were used, oldest first
    text: str = ""  # empty unless the parameters include stop strings
    cached_tokens: int = 0  # prompt tokens found in the engine's prefix cache
    seconds: float = 0.0  # time from the request to the last token, including queueing
