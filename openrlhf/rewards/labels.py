"""Startup check that the built-in verifiers can parse a dataset's labels."""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from openrlhf.checks import Finding
from openrlhf.rewards.checks import CodeTests, word_bounds
from openrlhf.rewards.protocol import shown


def math_answers(label: Any) -> list[str]:
    """Return a label's correct answers: its text or number, or every item if it is a list.

    Raises ValueError if there are none.
    """
    values: list[Any] = [label]
    if isinstance(label, list):
        values = label
    answers: list[str] = []
    for value in values:
        if isinstance(value, str) and value.strip():
            answers.append(value)
        elif _is_finite_number(value):
            answers.append(json.dumps(value))
        else:
            raise ValueError(
                "--reward.verifier math expects text, a number, or a list of these as label, "
                f"not {shown(label)}"
            )
    if not answers:
        raise ValueError(
            "--reward.verifier math expects at least one answer in a label that is a list, not []"
        )
    return answers


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def label_text(label: Any) -> str:
    """Return a label as the text that a verifier reads."""
    if isinstance(label, str):
        return label
    return json.dumps(label)


def _read_pattern(label: str) -> None:
    try:
        re.compile(label)
    except re.error as error:
        raise ValueError(
            f"--reward.verifier format expects a regular expression, not {shown(label)}: {error}"
        ) from error


READERS: dict[str, Callable[[Any], Any]] = {
    "math": math_answers,
    "code": lambda label: CodeTests.parse(label_text(label)),
    "format": lambda label: _read_pattern(label_text(label)),
    "length": lambda label: word_bounds(label_text(label)),
}


def check_labels(
    verifier: str, labels: Iterable[Any], *, column: str, origin: Callable[[int], str]
) -> list[Finding]:
    """Return a failure if a verifier cannot parse some of the labels.

    The failure counts these labels and quotes the first one. `origin` returns the dataset and row
    of the label at an index.
    """
    read = READERS[verifier]
    unreadable = 0
    count = 0
    first = ""
    for number, label in enumerate(labels):
        count += 1
        try:
            read(label)
        except ValueError as error:
            unreadable += 1
            if not first:
                first = f"{origin(number)}, column {column!r}: {error}"
    if not unreadable:
        return []
    seen = (
        f"{unreadable} of {count} labels cannot be parsed, so answers to their prompts could never "
        f"be rewarded. First: {first}."
    )
    fix = "Remove or correct these rows, or choose a different column with --data.label_key."
    return [Finding(seen, fix, fails=True)]
