"""A reward equal to the fraction of tests that a program passes.

`--reward.verifier code` gives a reward only if all tests pass, and supports more kinds of tests.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openrlhf.utils import run_program

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
SECONDS = 5.0  # CPU time limit of each test


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Return one reward per query.

    A label is JSON with inputs for stdin and expected outputs, such as
    `{"inputs": ["3\\n"], "outputs": ["9\\n"]}`.
    """
    rewards = [
        passed(query.removeprefix(prompt), json.loads(label))
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {"rewards": rewards, "scores": [float(reward == 1) for reward in rewards]}


def passed(response: str, tests: dict[str, list[str]]) -> float:
    """Return the fraction of tests that the response's last Python code block passes."""
    blocks = BLOCK.findall(response)
    if not blocks:
        return 0.0
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    runs = [
        (run_program(blocks[-1], given, seconds=SECONDS), expected) for given, expected in pairs
    ]
    return sum(run.ok and run.output.split() == expected.split() for run, expected in runs) / len(
        pairs
    )
