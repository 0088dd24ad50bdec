"""The benchmark workload: random models and data generated from a seed.

python -m benchmarks.workload FOLDER SIZE
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

VOCABULARY = 128
LETTERS = [chr(code) for code in range(33, 127)]
PAD, END, SECOND_END = 0, 1, 2
PROMPTS = 512
STEP_PROMPTS, SAMPLES, MICRO_BATCH = 32, 8, 32  # per GRPO step
SFT_ROWS, PAIRS, LONGEST_ROW = 512, 512, 256  # sizes of the offline cases
SHORT_PROMPT, LONG_PROMPT = 8, 96  # in characters; GSM8K and HH-RLHF prompts are long
LONGEST_PROMPT = {"prompts": 2 * SHORT_PROMPT, "long_prompts": LONG_PROMPT}
BATCH, OFFLINE_MICRO_BATCH, EPOCHS = 64, 8, 2
NEW_TOKENS = {"equal": 64, "tail": 256}
HEADS = 4
SIZES: dict[str, dict[str, Any]] = {  # model sizes by number of parameters
    "3M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704},
    "25M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408},
}


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token per character.

    The characters are printable ASCII and control characters, as byte-level tokenizers write them.
    """
    characters = [*LETTERS, *(chr(0x100 + byte) for byte in range(32))]
    words = {
        word: place
        for place, word in enumerate(["<pad>", "<end>", "<second>", *characters][:VOCABULARY])
    }
    Qwen2Tokenizer(
        vocab=words, merges=[], pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    ).save_pretrained(folder)


def save_model(folder: Path, size: str, *, ends: bool) -> None:
    """Save a random Qwen2 with tied embeddings.

    If `ends` is set, each token ends the response with probability 1/67; otherwise no token does.
    """
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=END,
            pad_token_id=PAD,
            **SIZES[size],
        )
    )
    with torch.no_grad():
        # Coordinate 0 of the residual stream is 0.5 for any text.
        # A token with a negative output weight for coordinate 0 is therefore impossible.
        layers: Any = model.model.layers
        for layer in layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        embeddings: Any = model.get_input_embeddings().weight
        embeddings[:, 0] = 0.5
        for token in (PAD,) if ends else (PAD, END, SECOND_END):
            embeddings[token, 0] = -20.0
    model.generation_config.eos_token_id = [END, SECOND_END] if ends else END
    model.save_pretrained(folder)
    save_tokenizer(folder)


def text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(LETTERS, k=length))


def write(folder: Path, size: str) -> None:
    """Write models of this size and all data to `folder`."""
    draw = random.Random(1)
    save_model(folder / f"{size}-equal", size, ends=False)
    save_model(folder / f"{size}-tail", size, ends=True)
    lengths = [draw.randint(SHORT_PROMPT, LONGEST_PROMPT["prompts"]) for _ in range(PROMPTS)]
    write_rows(folder / "prompts.jsonl", [{"input": text(draw, length)} for length in lengths])
    write_rows(folder / "sft.jsonl", [dialogue(draw, "output") for _ in range(SFT_ROWS)])
    for name, prompt in (("pairs", SHORT_PROMPT), ("long_prompts", LONG_PROMPT)):
        rows = [dialogue(draw, "chosen", "rejected", prompt=prompt) for _ in range(PAIRS)]
        write_rows(folder / f"{name}.jsonl", rows)


def dialogue(draw: random.Random, *answers: str, prompt: int = SHORT_PROMPT) -> dict[str, str]:
    """Return a prompt of the given length with answers of at least 7 characters.

    A prompt and its answer together have at most 255 characters, followed by the eos token.
    """
    longest = LONGEST_ROW - prompt - 1
    return {"input": text(draw, prompt)} | {
        name: text(draw, draw.randint(7, longest)) for name in answers
    }


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def count_tokens(path: Path) -> int:
    """Count the tokens in a file of `dialogue` rows: one per character and one eos per text."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sum(
        len(row["input"]) + len(answer) + 1
        for row in rows
        for name, answer in row.items()
        if name != "input"
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
