"""A reward that takes almost no time to compute and varies between samples."""

from __future__ import annotations

from typing import Any


def reward_of(text: str) -> float:
    return float(sum(map(ord, text)) % 7)


def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    return [reward_of(query) for query in queries]
