"""Several kinds of tokenizers, each trained in 0.1 s, and several kinds of chat templates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

CORPUS = (Path(__file__).parents[2] / "docs/agents.md").read_text().splitlines()
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
CHATML_MARKS = ["<|im_start|>", "<|endoftext|>"]

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
ZEPHYR = (
    "{% if tools %}<|system|>\n{{ tools | tojson }}{{ eos_token }}\n{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "zephyr": ZEPHYR,
    "plain": PLAIN,
    "instructions": (
        "{% for m in messages %}"
        "{% if m['role'] == 'assistant' %} {{ m['content'] | trim }} {{ eos_token }}"
        "{% else %}[INST] {{ m['content'] | trim }} [/INST]{% endif %}{% endfor %}"
    ),
    "thoughts opened": CHATML.replace("assistant\n{% if", "assistant\n<think>\n{% if"),
    "thoughts dropped": CHATML.replace("m['content'] }}", "m['content'].split('!')[-1] }}"),
    "tools at the end": (
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def _merges(
    pieces: pre_tokenizers.PreTokenizer, alphabet: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    return learned["vocab"], [tuple(merge) for merge in learned["merges"]]


@cache
def byte_level() -> Qwen2Tokenizer:
    """Return a tokenizer like Qwen2's, with ChatML markers."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary, merges = _merges(pieces, pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, eos_token="<|im_end|>", unk_token=None, pad_token=None
    )
    tokenizer.add_special_tokens({"additional_special_tokens": CHATML_MARKS})
    return tokenizer


@cache
def llama(*, legacy: bool) -> LlamaTokenizer:
    """Return a tokenizer like Llama-2's.

    The tokenizer adds a space before the text and, if `legacy` is set, after each special token.
    """
    learned, merges = _merges(pre_tokenizers.Metaspace(prepend_scheme="first"), CHARACTERS)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=legacy)


@cache
def unigram() -> PreTrainedTokenizerFast:
    """Return a sentencepiece unigram tokenizer."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        initial_alphabet=CHARACTERS,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "byte-level": byte_level,
    "llama": lambda: llama(legacy=False),
    "legacy llama": lambda: llama(legacy=True),
    "unigram": unigram,
}
