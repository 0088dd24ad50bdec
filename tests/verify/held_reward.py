"""The reward of the held tasks: 1 for the right answer with its end token, else 0."""

from __future__ import annotations


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """`queries` are prompts with responses, special tokens kept."""
    return [
        float(query.removeprefix(prompt) == label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
