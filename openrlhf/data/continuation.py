"""Tokenizes text that follows other tokens, as if both were encoded together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 64  # maximum number of preceding tokens that are encoded together with a text


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A text encoded as the continuation of other tokens.

    `exact` is false if the tokenizer would merge the start of the text with the preceding
    characters. Sampled tokens cannot be changed, so in that case the text begins with a new token.
    """

    tokens: list[int]
    exact: bool


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text, without the special tokens that the tokenizer would add."""
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoded["input_ids"])  # type: ignore[arg-type]


def encode_after(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], text: str
) -> Continuation:
    """Encode `text` as a continuation of the tokens `before`.

    A tokenizer may treat the start of a text specially. For example, sentencepiece inserts a
    leading space.

    Example: a Llama tokenizer encodes "\\n<|user|>" as `\\n`, `<|user|>` if the text follows
    `</s>`, and as `▁`, `\\n`, `<|user|>` if the text stands alone.
    """
    if not text:
        return Continuation(tokens=[], exact=True)
    tokens = _encode_in_context(tokenizer, _text_before(tokenizer, before), text)
    if tokens is not None:
        return Continuation(tokens=tokens, exact=True)
    tokens = _encode_in_context(tokenizer, str(tokenizer.eos_token or ""), text)
    if tokens is None:
        tokens = encode_text(tokenizer, text)
    return Continuation(tokens=tokens, exact=False)


def encode_as_sample(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], text: str
) -> list[int]:
    """Return the tokens of a text as if they had been sampled after the tokens `before`.

    The eos token ends the sample, unless the text ends with it.
    """
    tokens = encode_after(tokenizer, before, text).tokens
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    if tokens[-1:] != [end]:
        tokens = [*tokens, end]
    return tokens


def _text_before(tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> str:
    """Decode the last tokens of `before`, starting at the last added token.

    Tokenizers split a text at added tokens before they encode it.
    """
    added = tokenizer.added_tokens_decoder
    tail = list(before[-CONTEXT_TOKENS:])
    start = 0
    for position, token in enumerate(tail):
        if token in added:
            start = position
    return str(tokenizer.decode(tail[start:], skip_special_tokens=False))


def _encode_in_context(
    tokenizer: PreTrainedTokenizerBase, context: str, text: str
) -> list[int] | None:
    """Return the tokens of `text` after `context`, or None if a token spans the boundary."""
    lead = encode_text(tokenizer, context)
    joined = encode_text(tokenizer, context + text)
    if joined[: len(lead)] != lead:
        return None
    return joined[len(lead) :]
