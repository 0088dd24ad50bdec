"""What is measured: models of 3M and 25M parameters, prompts, and supervised rows. Random, from a seed.

python -m benchmarks.workload FOLDER
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
PROMPTS, LONGEST_PROMPT = 512, 16
STEP_PROMPTS, SAMPLES, MICRO_BATCH = 32, 8, 32  # of a GRPO step
NEW_TOKENS = {"equal": 64, "tail": 256}
SIZES: dict[str, dict[str, Any]] = {
    "3M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704, "num_attention_heads": 4},
    "25M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408, "num_attention_heads": 8},
}


def save_tokenizer(folder: Path) -> None:
    """One token per character: printable ASCII, and control characters as byte-level tokenizers write them."""
    characters = [*LETTERS, *(chr(0x100 + byte) for byte in range(32))]
    words = {word: place for place, word in enumerate(["<pad>", "<end>", "<second>", *characters][:VOCABULARY])}
    Qwen2Tokenizer(vocab=words, merges=[], pad_token="<pad>", eos_token="<end>", unk_token="<pad>").save_pretrained(
        folder
    )


def save_model(folder: Path, size: str, *, ends: bool) -> None:
    """A random Qwen2 with tied embeddings. `ends`: every token ends the response with probability 1/64; else none does."""
    torch.manual_seed(1)
    heads = SIZES[size]["num_attention_heads"]
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            num_key_value_heads=heads // 2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=END,
            pad_token_id=PAD,
            **SIZES[size],
        )
    )
    with torch.no_grad():
        # Coordinate 0 of the residual stream is 0.5 whatever the text: a negative weight there makes a token impossible.
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


def write(folder: Path) -> None:
    """Write everything below `folder`."""
    draw = random.Random(1)
    for size in SIZES:
        save_model(folder / f"{size}-equal", size, ends=False)
        save_model(folder / f"{size}-tail", size, ends=True)
    prompts = [{"input": text(draw, draw.randint(8, LONGEST_PROMPT))} for _ in range(PROMPTS)]
    rows = [{"input": text(draw, 8), "output": text(draw, draw.randint(8, 247))} for _ in range(4 * PROMPTS)]
    pairs = [
        {
            "prompt": text(draw, 8),
            "chosen": text(draw, draw.randint(8, 247)),
            "rejected": text(draw, draw.randint(8, 247)),
        }
        for _ in range(2 * PROMPTS)
    ]
    for name, content in (("prompts", prompts), ("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
