"""The reward for the held-out tasks: 1 for the correct answer followed by the eos token, else 0."""

from __future__ import annotations


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """Return one reward per query; a query is a prompt and its response, with special tokens."""
    return [
        float(query.removeprefix(prompt) == label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
