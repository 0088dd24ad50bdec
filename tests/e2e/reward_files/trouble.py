"""The reward of letters.py, except that it raises on the digit 7 and hangs for the label "hang"."""

from __future__ import annotations

import time
from typing import Any

from letters import reward_func as letters


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    if labels == ["hang"]:
        time.sleep(600)
    if "7" in queries[0].removeprefix(prompts[0]):
        raise ValueError("sevens are bad luck")
    return letters(queries, prompts, labels)
