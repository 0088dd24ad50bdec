"""The reward for sums: 1 if the last number in the answer is correct, else 0."""

from __future__ import annotations

import re


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Return one reward per query, which is a prompt followed by its response."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query.removeprefix(prompt)
        numbers = re.findall(r"\d+", response.replace(",", ""))
        rewards.append(float(bool(numbers) and numbers[-1] == label))
    return {"rewards": rewards, "scores": rewards}
