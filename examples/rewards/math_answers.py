"""A reward of 1 if the boxed answer equals the label, else 0.

`--reward.verifier math` gives the same reward and accepts more forms of answers.
"""

from __future__ import annotations

from typing import Any

from openrlhf.utils import extract_boxed_answer, grade_answer


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Return one reward per query. Labels are bare answers such as `72` or `\\frac{1}{2}`."""
    answers = [
        extract_boxed_answer(query.removeprefix(prompt))
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    rewards = [
        float(grade_answer(answer, label)) for answer, label in zip(answers, labels, strict=True)
    ]
    boxed = [float(answer is not None) for answer in answers]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"boxed": boxed}}
