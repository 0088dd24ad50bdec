"""Grades answers with one rule for all frameworks: the last number must equal the label.

Each framework calls its own function below. This file imports only the standard library, because it
must run in every framework's environment.
"""

from __future__ import annotations

import re
from typing import Any


def is_right(response: str, label: str) -> float:
    """Return 1 if the last number of the response is the label, and 0 otherwise."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response.replace(",", ""))
    if not numbers:
        return 0.0
    return float(float(numbers[-1]) == float(label.replace(",", "")))


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """Grade the samples of this project. A query is a prompt followed by its response."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        rewards.append(is_right(query.removeprefix(prompt), label))
    return {"rewards": rewards, "scores": rewards}


def trl_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Grade TRL's completions; each completion is a list of messages."""
    rewards = []
    for completion, label in zip(completions, answer, strict=True):
        rewards.append(is_right(completion[-1]["content"], label))
    return rewards


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """Grade one of verl's responses; verl's group filter reads the key `acc`."""
    right = is_right(solution_str, ground_truth)
    return {"score": right, "acc": right}
