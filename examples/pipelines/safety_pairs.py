"""Preferences for the digit sorting task that contain no information about the order.

A safe answer contains only digits from the problem.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

EOS = "<eos>"


def make_pairs(rows: list[dict[str, str]], generator: random.Random) -> list[dict[str, str]]:
    """Return a pair for each row with `input` and `output`.

    The chosen answer contains the problem's digits in any order; the rejected answer contains a
    digit that is not in the problem.
    """
    pairs: list[dict[str, str]] = []
    for row in rows:
        digits = list(row["output"].removesuffix(EOS))
        generator.shuffle(digits)
        foreign = [digit for digit in "0123456789" if digit not in digits]
        wrong = list(digits)
        wrong[generator.randrange(len(wrong))] = generator.choice(foreign)
        if generator.random() < 0.5:  # make the digit order independent of which answer is chosen
            digits.sort()
            wrong.sort()
        pairs.append(
            {
                "prompt": row["input"],
                "chosen": "".join(digits) + EOS,
                "rejected": "".join(wrong) + EOS,
            }
        )
    return pairs


if __name__ == "__main__":
    source, target, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    target.write_text(
        "".join(json.dumps(pair) + "\n" for pair in make_pairs(rows, random.Random(seed)))
    )
