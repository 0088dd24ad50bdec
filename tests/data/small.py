"""Tiny tokenizers with easily checked ids, chat templates, and the path to the GSM8K test data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<unk>",
    "<eos>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<think>",
    "</think>",
]
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
MERGES = [(" ", "b"), ("\n", "B"), ("o", "k")]  # adds the tokens " b", "\nB" and "ok"

PLAIN_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Drops the reasoning from all assistant messages except the last.
FORGETFUL_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Begins the last answer with a reasoning block, which may be empty.
THINKING_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' and loop.last and '</think>' not in message.content %}"
    "<think></think>{% endif %}{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
SPACED_CHAT = (
    "{% for message in messages %}{{ 'A: ' if message.role == 'user' else 'B: ' }}"
    "{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}B: {% endif %}"
)


def build_tokenizer(
    chat_template: str | None = None, eos: str | None = "<eos>"
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with predictable ids.

    Ids 0–7 are special tokens, 8 is the newline, a character has id 9 + (code − 32), and the
    merges come last.
    """
    vocab = {
        token: number for number, token in enumerate([*SPECIALS, *LETTERS, *map("".join, MERGES)])
    }
    backend = Tokenizer(BPE(vocab, MERGES, unk_token="<unk>"))
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = chat_template
    return tokenizer


def json_lines(rows: list[dict[str, Any]]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def gsm8k() -> Path:
    """Return the GSM8K training file; skip the test if it is missing."""
    root = os.environ.get("OPENRLHF_TEST_DATA") or Path(__file__).parents[2] / "../shared/data"
    path = Path(root) / "gsm8k" / "train.jsonl"
    if not path.exists():
        pytest.skip(f"GSM8K is not at {path} (set OPENRLHF_TEST_DATA to the test data folder)")
    return path


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words including their leading space.

    "Assistant: yes" becomes "Assistant:" and " yes". The trailing space in "Assistant: " is a
    separate token.
    """
    words = {"<unk>": 0, "<eos>": 1, "▁": 2, "\nAssistant:": 3, "User:": 4, "▁yes": 5}
    spaced = Tokenizer(WordLevel(words, unk_token="<unk>"))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token="<eos>", unk_token="<unk>")
