"""The demo's reward: 1 for the right digits followed by the end token, else 0."""

from __future__ import annotations


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, list[float]]:
    """`queries` are prompts with responses, special tokens kept; one reward per query."""
    rewards = [
        float(query.removeprefix(prompt) == label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {"rewards": rewards, "scores": rewards}
