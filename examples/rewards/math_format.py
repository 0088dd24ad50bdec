"""A reward for a correct answer, plus a small reward for the format.

The expected format is reasoning between <think> and </think>, followed by the boxed answer.
"""

from __future__ import annotations

import re
from typing import Any

from openrlhf.utils import extract_boxed_answer, grade_answer

FORM = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>((?:(?!</?think>).)+)", re.DOTALL)
FORM_WEIGHT = 0.1


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Return a reward and a score per query.

    The score is 1 if the answer is correct. Evaluation and dynamic filtering use the score.
    """
    rewards, scores, forms = [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        found = FORM.fullmatch(query.removeprefix(prompt))
        right = float(grade_answer(extract_boxed_answer(found[1] if found else ""), label))
        forms.append(float(found is not None))
        scores.append(right)
        rewards.append((1 - FORM_WEIGHT) * right + FORM_WEIGHT * forms[-1])
    return {"rewards": rewards, "scores": scores, "extra_logs": {"form": forms}}
