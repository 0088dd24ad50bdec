"""A reward for a right answer, and a small one for the form.

The form is reasoning between <think> and </think>, then the boxed answer.
"""

from __future__ import annotations

import re
from typing import Any

from openrlhf.utils import extract_boxed_answer, grade_answer

FORM = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>((?:(?!</?think>).)+)", re.DOTALL)
FORM_WEIGHT = 0.1


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Return rewards and scores.

    The score, which evaluation and dynamic filtering use, is 1 if the answer is right.
    """
    rewards, scores, forms = [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        found = FORM.fullmatch(query.removeprefix(prompt))
        right = float(grade_answer(extract_boxed_answer(found[1] if found else ""), label))
        forms.append(float(found is not None))
        scores.append(right)
        rewards.append((1 - FORM_WEIGHT) * right + FORM_WEIGHT * forms[-1])
    return {"rewards": rewards, "scores": scores, "extra_logs": {"form": forms}}
