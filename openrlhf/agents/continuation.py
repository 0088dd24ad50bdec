"""Tokenization of a text that follows other tokens, as if both were encoded as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 64  # maximum number of preceding tokens that are encoded with a text


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The tokens of a text.

    `exact` is false if the tokenizer would merge the start of the text and the characters before it
    into one token. Sampled tokens cannot be merged, so the text then begins with a new token.
    """

    tokens: list[int]
    exact: bool


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text, without the special tokens that a tokenizer adds."""
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoded["input_ids"])  # type: ignore[arg-type]


def encode_after(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], text: str
) -> Continuation:
    """Return the tokens of `text` when it follows the tokens `before`.

    A tokenizer may treat the start of a text differently: sentencepiece adds a space there.

    Example: a Llama tokenizer encodes "\\n<|user|>" as `\\n`, `<|user|>` after `</s>`, and as `▁`,
    `\\n`, `<|user|>` alone.
    """
    if not text:
        return Continuation(tokens=[], exact=True)
    tokens = _encode_in_context(tokenizer, _text_before(tokenizer, before), text)
    if tokens is not None:
        return Continuation(tokens=tokens, exact=True)
    tokens = _encode_in_context(tokenizer, str(tokenizer.eos_token or ""), text)
    if tokens is None:
        tokens = encode(tokenizer, text)
    return Continuation(tokens=tokens, exact=False)


def _text_before(tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> str:
    """Return the end of the text of `before`, starting at its last added token.

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
    lead = encode(tokenizer, context)
    joined = encode(tokenizer, context + text)
    if joined[: len(lead)] != lead:
        return None
    return joined[len(lead) :]
