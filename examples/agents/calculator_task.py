"""A toy task for agents: sums that a tiny model cannot compute without a calculator tool.

    python examples/agents/calculator_task.py FOLDER SEED

The task includes transcripts to imitate. Half of the transcripts call the calculator; in the
other half, the answer is a guess. After supervised training, the policy therefore uses the tool
only sometimes. Reinforcement learning can reward the policy for using the tool more often.
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
from transformers import AddedToken, AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer
from transformers.utils import logging

CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
MARKS = ["<|user|>", "<|assistant|>", "<|tool|>"]
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def calculator_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token for each character and each fixed part of a tool call."""
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", END, "<unk>", *"0123456789+-*abcdeghlnorst"])
    }
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token="<pad>", eos_token=END, unk_token="<unk>"
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (CALL, CALLED)])
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_task(folder: Path, *, seed: int = 1, transcripts: int = 6000, prompts: int = 4000) -> None:
    """Write transcripts.jsonl, prompts.jsonl, held_out.jsonl and an untrained model to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    sums = sorted({f"{draw.randrange(10, 100)}+{draw.randrange(10, 100)}" for _ in range(12_000)})
    draw.shuffle(sums)
    held_out, questions = sums[:200], sums[200:]
    lines = [
        json.dumps({"messages": _transcript(question, draw)})
        for question in questions[:transcripts]
    ]
    (folder / "transcripts.jsonl").write_text("\n".join(lines) + "\n")
    _write(folder / "prompts.jsonl", draw.choices(questions, k=prompts))
    _write(folder / "held_out.jsonl", held_out)
    save_model(folder / "model", seed=seed)


def _write(path: Path, questions: list[str]) -> None:
    rows = [
        json.dumps({"input": question, "answer": _sum(question), "datasource": "sums"})
        for question in questions
    ]
    path.write_text("\n".join(rows) + "\n")


def _sum(question: str) -> str:
    return str(sum(map(int, question.split("+"))))


def _transcript(question: str, draw: random.Random) -> list[dict[str, str]]:
    if draw.random() < 0.5:
        guess = str(int(_sum(question)) + draw.choice([-20, -10, 10, 20]))
        return [{"role": "user", "content": question}, {"role": "assistant", "content": guess}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"{CALL}{question}{CALLED}"},
        {"role": "tool", "content": _sum(question)},
        {"role": "assistant", "content": _sum(question)},
    ]


def save_model(folder: Path, *, seed: int) -> None:
    """Save an untrained Qwen2 with about half a million parameters."""
    tokenizer = calculator_tokenizer()
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_task(Path(sys.argv[1]), seed=int(sys.argv[2]))
