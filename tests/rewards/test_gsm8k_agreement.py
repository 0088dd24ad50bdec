"""The math verifier compared with GSM8K's grades for four models' solutions to 1,319 problems."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from openrlhf.rewards.graders import grade_math

ROOT = Path(__file__).parents[2]
SOLUTIONS = (
    ROOT
    / os.environ.get("OPENRLHF_TEST_DATA", "../shared/data")
    / "gsm8k/example_model_solutions.jsonl"
)
FORMATS = [
    "A: {}",
    "#### {}",
    r"The answer is \boxed{{{}}}.<|im_end|>",
    "The final answer is ${}$.",
]


def problems() -> list[dict[str, Any]]:
    if not SOLUTIONS.exists():
        pytest.skip(f"{SOLUTIONS} does not exist. Set OPENRLHF_TEST_DATA to the test data folder.")
    return [json.loads(line) for line in SOLUTIONS.read_text().splitlines()]


def disagreements(rows: list[dict[str, Any]], style: str) -> list[tuple[str, str, bool]]:
    """Return, for each disagreement, the end of the solution, the answer and GSM8K's verdict."""
    found = []
    for row in rows:
        label = row["ground_truth"].rpartition("A:")[2].strip()
        for graded in (value for value in row.values() if isinstance(value, dict)):
            work, marker, answer = graded["solution"].rpartition("A:")
            response = work + style.format(answer.strip()) if marker else graded["solution"]
            if bool(grade_math(response, label)) != graded["is_correct"]:
                found.append((response[-60:], label, graded["is_correct"]))
    return found


@pytest.mark.parametrize("style", FORMATS)
def test_verifier_agrees_with_gsm8k_on_a_slice(style: str):
    assert disagreements(problems()[::20], style) == []


@pytest.mark.verify
@pytest.mark.parametrize("style", FORMATS)
def test_verifier_agrees_with_gsm8k_on_all_solutions(style: str):
    rows = problems()
    assert len(rows) == 1319
    assert disagreements(rows, style) == []
