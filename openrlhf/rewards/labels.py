"""Checks at startup that the built-in verifiers can parse a dataset's labels."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.checks import Finding
from openrlhf.rewards.checks import label_text, read_tests, word_bounds
from openrlhf.rewards.protocol import shown

_END_TOKEN = re.compile(
    r"(</s>|<eos>|<end_of_turn>|<\|(?:im_end|eot_id|endoftext|end_of_text)\|>)\s*$"
)
_ANSWER_MARKERS = ("####", r"\boxed", r"\fbox")  # the grader reads the answer at the marker


def math_answers(label: Any) -> list[str]:
    """Return a label's correct answers: its text or number, or every item if it is a list.

    Raises ValueError if the label has no answer.
    """
    values: list[Any] = [label]
    if isinstance(label, list):
        values = label
    answers: list[str] = []
    for value in values or [None]:
        is_number = type(value) in (int, float) and math.isfinite(value)
        is_text = isinstance(value, str) and value.strip()
        if not (is_text or is_number):
            raise ValueError(
                "--reward.verifier math expects a label that is text, a number, or a nonempty list "
                f"of these, not {shown(label)}"
            )
        answers.append(label_text(value))
    return answers


def _read_pattern(label: Any) -> None:
    pattern = label_text(label)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"--reward.verifier format expects a regular expression, not {shown(pattern)}: {error}"
        ) from error


READERS: dict[str, Callable[[Any], Any]] = {
    "math": math_answers,
    "code": read_tests,
    "format": _read_pattern,
    "length": word_bounds,
}


def check_labels(
    verifier: str, labels: Sequence[Any], *, column: str, origin: Callable[[int], str]
) -> list[Finding]:
    """Return a failure if a verifier cannot parse some labels, or a notice about end tokens.

    The failure counts the labels that cannot be parsed and quotes the first such label. `origin`
    returns the dataset and row of the label at an index.
    """
    read = READERS[verifier]
    unreadable = 0
    first = ""
    for number, label in enumerate(labels):
        try:
            read(label)
        except ValueError as error:
            unreadable += 1
            if not first:
                first = f"{origin(number)}, column {column!r}: {error}"
    if not unreadable:
        return _end_tokens(verifier, labels, column=column, origin=origin)
    seen = (
        f"{unreadable} of {len(labels)} labels cannot be parsed, so answers to their prompts could "
        f"never be rewarded. First: {first}."
    )
    fix = "Remove or correct these rows, or choose a different column with --data.label_key."
    return [Finding(seen, fix, fails=True)]


def _end_tokens(
    verifier: str, labels: Sequence[Any], *, column: str, origin: Callable[[int], str]
) -> list[Finding]:
    """Return a notice if math labels end with an end-of-text token, which no answer matches."""
    if verifier != "math":
        return []
    places: list[int] = []
    for number, label in enumerate(labels):
        text = label_text(label)
        has_marker = any(marker in text for marker in _ANSWER_MARKERS)
        if _END_TOKEN.search(text) and not has_marker:
            places.append(number)
    if not places:
        return []
    first = places[0]
    seen = (
        f"{len(places)} of {len(labels)} labels end with an end-of-text token. --reward.verifier "
        "math grades responses without special tokens, so no answer matches these labels. First: "
        f"{origin(first)}, column {column!r}: {shown(labels[first])}."
    )
    return [Finding(seen, "Remove the token from the labels.")]
