"""Tokens of a text that follows other tokens, as if all had been encoded as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAIL = 64  # at most this many tokens before the text are encoded with it


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The tokens of a text.

    `exact` is false if a tokenizer would merge the text with the characters before it into one
    token. Tokens that were sampled cannot be merged, so the text then begins with a token of its
    own.
    """

    tokens: list[int]
    exact: bool


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a whole text, without the special tokens that a tokenizer would add
    around it.
    """
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[arg-type]


def encode_after(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], text: str
) -> Continuation:
    """Return the tokens of `text` where it follows the tokens `before`.

    A tokenizer may treat the beginning of a text in a special way: sentencepiece puts a space
    there.

    Example, a Llama tokenizer, `</s>` and the text "\\n<|user|>": `\\n`, `<|user|>`; of the text
    alone: `▁`, `\\n`, `<|user|>`.
    """
    if not text:
        return Continuation(tokens=[], exact=True)
    if not before:
        return Continuation(tokens=encode(tokenizer, text), exact=True)
    tokens = _encode_in_context(tokenizer, _text_before(tokenizer, before), text)
    if tokens is not None:
        return Continuation(tokens=tokens, exact=True)
    tokens = _encode_in_context(tokenizer, str(tokenizer.eos_token or ""), text)
    if tokens is None:
        tokens = encode(tokenizer, text)
    return Continuation(tokens=tokens, exact=False)


def _text_before(tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> str:
    """Return the end of the text of `before`, from its last added token on: text is split there
    before it is encoded.
    """
    added = tokenizer.added_tokens_decoder
    tail = list(before[-TAIL:])
    start = 0
    for place, token in enumerate(tail):
        if token in added:
            start = place
    return str(tokenizer.decode(tail[start:], skip_special_tokens=False))


def _encode_in_context(
    tokenizer: PreTrainedTokenizerBase, context: str, text: str
) -> list[int] | None:
    """Return the tokens of `text` after `context`, or None if one token covers the end of the one
    and the start of the other.
    """
    lead = encode(tokenizer, context)
    joined = encode(tokenizer, context + text)
    if joined[: len(lead)] != lead:
        return None
    return joined[len(lead) :]
