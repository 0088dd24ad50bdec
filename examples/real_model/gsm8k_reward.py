"""The reward for GSM8K: 1 for the right number, 0.1 for any number in the requested form, else 0.

At first, a small model is seldom right. The small reward teaches it the requested form, so that
more of its answers can be graded. The score, which evaluations report, is 1 only for the right
number.
"""

from __future__ import annotations

import re

FORM = 0.1  # reward for a wrong answer in the requested form
ANSWER = re.compile(r"####\s*\$?(-?[\d,]+(?:\.\d+)?)")


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Return one reward per query, which is a prompt followed by its response.

    A label is a GSM8K solution, which ends with the number in the form `#### 72`.
    """
    rewards, scores = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answers = ANSWER.findall(query.removeprefix(prompt))
        score = float(bool(answers) and number(answers[-1]) == number(ANSWER.findall(label)[-1]))
        scores.append(score)
        if answers:
            rewards.append(max(score, FORM))
        else:
            rewards.append(0.0)
    return {"rewards": rewards, "scores": scores}


def number(text: str) -> float:
    """Convert `1,200` to a number."""
    return float(text.replace(",", "") or "nan")
