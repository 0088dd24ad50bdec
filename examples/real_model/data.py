"""Filters GSM8K and HH-RLHF down to conversations short enough to train on a CPU in minutes.

    .venv/bin/python examples/real_model/data.py SOURCE data --model models/smollm2-135m-instruct

SOURCE contains gsm8k/train.jsonl and hh-rlhf/harmless-base-test.jsonl.gz, as published. The output
is written to data/gsm8k and data/pairs. With --only gsm8k, SOURCE does not need the other file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

LONGEST = 128  # maximum number of tokens in a text
SOLUTIONS, HELD_OUT_SOLUTIONS = 640, 96
FORM = "Solve this step by step. End with a line of the form: #### NUMBER"
PAIRS, HELD_OUT_PAIRS = 720, 225
SPEAKERS = {"Human": "user", "Assistant": "assistant"}

Row = dict[str, Any]
Count = Callable[[str], int]  # counts the tokens in a text


def solutions(path: Path, count: Count) -> list[Row]:
    """Return GSM8K problems with short solutions.

    Calculator annotations (<<3+4=7>>) are removed.
    """
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", problem["answer"])
        if count(problem["question"] + answer) <= LONGEST:
            rows.append({"question": problem["question"], "answer": answer})
    return rows


def question(row: Row) -> Row:
    """Return the prompt for reinforcement learning, with the solution as its label."""
    content = f"{row['question']}\n{FORM}"
    return {
        "input": [{"role": "user", "content": content}],
        "answer": row["answer"],
        "datasource": "gsm8k",
    }


def pairs(path: Path, count: Count) -> list[Row]:
    """Return HH-RLHF pairs of short conversations that differ only in their last answer."""
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            pair = json.loads(line)
            if max(count(pair["chosen"]), count(pair["rejected"])) > LONGEST:
                continue
            chosen, rejected = conversation(pair["chosen"]), conversation(pair["rejected"])
            same_start = chosen[:-1] == rejected[:-1] and chosen != rejected
            answered = all(
                messages[-1]["role"] == "assistant" and messages[-1]["content"]
                for messages in (chosen, rejected)
            )
            if same_start and answered:
                rows.append({"chosen": chosen, "rejected": rejected})
    return rows


def conversation(text: str) -> list[Row]:
    """Split a text into messages, each of which begins with `Human:` or `Assistant:`."""
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]
    messages = []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": SPEAKERS[speaker], "content": said.strip()})
    return messages


def write(path: Path, rows: list[Row]) -> None:
    """Write rows to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_data(source: Path, folder: Path, model: Path, *, seed: int, only: str = "") -> None:
    """Write training and held-out rows in an order that depends on `seed`.

    The prompts of the preference pairs are also written to separate files. If `only` is "gsm8k",
    only the problems are written.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    order = random.Random(seed)
    problems = solutions(source / "gsm8k" / "train.jsonl", count)
    order.shuffle(problems)
    held_out = problems[:HELD_OUT_SOLUTIONS]
    trained = problems[HELD_OUT_SOLUTIONS : HELD_OUT_SOLUTIONS + SOLUTIONS]
    write(folder / "gsm8k" / "held_out.jsonl", held_out)
    write(folder / "gsm8k" / "train.jsonl", trained)
    write(folder / "gsm8k" / "held_out_prompts.jsonl", [question(row) for row in held_out])
    write(folder / "gsm8k" / "prompts.jsonl", [question(row) for row in trained])
    if only == "gsm8k":
        return

    preferences = pairs(source / "hh-rlhf" / "harmless-base-test.jsonl.gz", count)
    order.shuffle(preferences)
    held_out = preferences[:HELD_OUT_PAIRS]
    trained = preferences[HELD_OUT_PAIRS : HELD_OUT_PAIRS + PAIRS]
    write(folder / "pairs" / "held_out.jsonl", held_out)
    write(folder / "pairs" / "train.jsonl", trained)
    write(
        folder / "pairs" / "held_out_prompts.jsonl",
        [{"input": pair["chosen"][:-1]} for pair in held_out[:64]],
    )
    write(folder / "pairs" / "prompts.jsonl", [{"input": pair["chosen"][:-1]} for pair in trained])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="whose tokens are counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["gsm8k"], default="")
    options = parser.parse_args()
    make_data(options.source, options.folder, options.model, seed=options.seed, only=options.only)
