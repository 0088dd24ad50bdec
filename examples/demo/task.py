"""The demo's task, generated from scratch: sort five digits.

The answer to `sort 52918=` is `12589` followed by the eos token. A model with less than a million
parameters learns the answer format in seconds of supervised training, and learns the rest from
rewards.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

os.environ.setdefault(
    "DS_ACCELERATOR", "cpu"
)  # this script needs no GPU, so keep DeepSpeed from looking for one

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer
from transformers.utils import logging

DIGITS = 5
HELD_OUT = 400
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPACE = "Ġ"  # a space, as byte-level tokenizers write it
VOCABULARY = [PAD, EOS, UNK, *"0123456789=sort", SPACE]


def make_task(folder: Path, *, seed: int) -> None:
    """Write problems, a tokenizer and an untrained model to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    problems = sorted({"".join(generator.choices("0123456789", k=DIGITS)) for _ in range(20_000)})
    generator.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    _write(folder / "train.jsonl", train[:8000])
    _write(folder / "prompts.jsonl", train[8000:])
    _write(folder / "held_out.jsonl", held_out)
    _write_pairs(folder / "pairs.jsonl", train, generator)
    _write_pairs(folder / "held_out_pairs.jsonl", held_out, generator)
    make_model(folder / "model", seed=seed)


def _write(path: Path, problems: list[str]) -> None:
    rows = [
        {"input": f"sort {digits}=", "output": "".join(sorted(digits)) + EOS, "datasource": "sort"}
        for digits in problems
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_pairs(path: Path, problems: list[str], generator: random.Random) -> None:
    """Write preference pairs, each with a correct answer and a failed attempt."""
    answers = [sorted(digits) for digits in problems]
    attempts = [_attempt(answer, generator) for answer in answers]
    rows = [
        {
            "prompt": f"sort {digits}=",
            "chosen": "".join(answer) + EOS,
            "rejected": "".join(attempt) + EOS,
        }
        for digits, answer, attempt in zip(problems, answers, attempts, strict=True)
        if attempt != answer
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _attempt(answer: list[str], generator: random.Random) -> list[str]:
    """Return an attempt with a beginner's mistakes.

    The attempt may have wrong digits, digits out of order, or one digit too few or too many.
    Sometimes the attempt equals the answer.
    """
    attempt = list(answer)
    for position in generator.sample(range(DIGITS), generator.choice((0, 1, 1, 2, 3))):
        attempt[position] = generator.choice("0123456789")
    slip = generator.random()
    if slip < 0.6:
        attempt.sort()
    elif slip < 0.7:
        attempt.pop(generator.randrange(DIGITS))
    elif slip < 0.8:
        attempt.insert(generator.randrange(DIGITS), generator.choice(attempt))
    elif slip < 0.9:
        generator.shuffle(attempt)
    return attempt


def make_model(folder: Path, *, seed: int) -> None:
    """Save an untrained Qwen2 with 0.8 million parameters and one token per character."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(VOCABULARY))}
    Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNK
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER SEED")
    make_task(Path(sys.argv[1]), seed=int(sys.argv[2]))
