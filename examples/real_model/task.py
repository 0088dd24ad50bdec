"""Creates a task that a small chat model fails at first: conversations that ask for sums.

    .venv/bin/python examples/real_model/task.py data/sums

Writes prompts.jsonl for training and held_out.jsonl for evaluation, without shared problems.
`reward.py` scores the answers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HELD_OUT = 72
SMALLEST, LARGEST = 1, 19


def make_task(folder: Path, *, seed: int) -> None:
    """Write the problems in an order that depends on `seed`."""
    problems = []
    for first in range(SMALLEST, LARGEST + 1):
        for second in range(SMALLEST, LARGEST + 1):
            problems.append((first, second))
    random.Random(seed).shuffle(problems)
    folder.mkdir(parents=True, exist_ok=True)
    write_problems(folder / "held_out.jsonl", problems[:HELD_OUT])
    write_problems(folder / "prompts.jsonl", problems[HELD_OUT:])


def write_problems(path: Path, problems: list[tuple[int, int]]) -> None:
    """Write one conversation per line, with the answer as its label."""
    lines = []
    for first, second in problems:
        question = f"What is {first} + {second}? Answer with the number only."
        row = {
            "input": [{"role": "user", "content": question}],
            "answer": str(first + second),
            "datasource": "sums",
        }
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_task(options.folder, seed=options.seed)
