"""A reward that even a random policy can learn: the share of the letter `a` in a response."""

from __future__ import annotations

from typing import Any


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    shares = [response.count("a") / len(response) for response in responses]
    return {
        "rewards": shares,
        "scores": [float(share > 0) for share in shares],
        "extra_logs": {"digits": [sum(map(str.isdigit, response)) for response in responses]},
    }
