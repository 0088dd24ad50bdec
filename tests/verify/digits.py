"""The reward for the learning runs: the fraction of digits in their correct positions.

The score is 1 if the whole answer is correct, else 0.
"""

from __future__ import annotations

from itertools import zip_longest
from statistics import fmean

END = "<eos>"


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Return one reward per query; a query is a prompt and its response, with special tokens."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    pairs = list(zip(answers, labels, strict=True))
    return {
        "rewards": [
            fmean(a == b for a, b in zip_longest(answer.removesuffix(END), label.removesuffix(END)))
            for answer, label in pairs
        ],
        "scores": [float(answer == label) for answer, label in pairs],
    }
