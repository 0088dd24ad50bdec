"""The check of dataset labels at startup."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from openrlhf.rewards.graders import grade_math
from openrlhf.rewards.labels import check_labels

UNREADABLE: list[tuple[str, Any]] = [
    ("math", ""),
    ("math", "  "),
    ("math", None),
    ("math", []),
    ("math", [42, ""]),
    ("math", {"answer": 42}),
    ("math", True),
    ("math", float("nan")),
    ("math", Decimal("4.5")),
    ("math", [b"42"]),
    ("code", ""),
    ("code", "assert f(1) == 1"),
    ("code", {"inputs": ["1"], "outputs": []}),
    ("code", {"inputs": [5], "outputs": [25], "fn_name": "square"}),
    ("length", ""),
    ("length", "20-10"),
    ("format", "("),
]
READABLE: list[tuple[str, Any]] = [
    ("math", "42"),
    ("math", 42),
    ("math", [42, 43.5]),
    ("math", ["a", "b"]),
    ("math", r"\text{no}"),
    ("code", {"tests": "assert f(1) == 1"}),
    ("length", 200),
    ("format", ""),
]


@pytest.mark.parametrize(("verifier", "label"), UNREADABLE)
def test_finding_counts_unparsable_labels_and_locates_the_first(verifier: str, label: Any) -> None:
    readable = next(each for name, each in READABLE if name == verifier)
    [found] = check_labels(
        verifier,
        [readable, label, label],
        column="answer",
        origin=lambda row: f"rows.jsonl, row {row}",
    )
    assert found.fails
    assert (
        "2 of 3" in found.seen and "rows.jsonl, row 1, column 'answer'" in found.seen and found.fix
    )


@pytest.mark.parametrize(("verifier", "label"), READABLE)
def test_parsable_label_passes_the_check(verifier: str, label: Any) -> None:
    assert check_labels(verifier, [label], column="answer", origin=str) == []


@pytest.mark.parametrize("end", ["<eos>", "</s>", "<|im_end|>\n"])
def test_math_label_that_ends_with_an_end_token_is_reported(end: str) -> None:
    labels = ["42", f"43{end}", rf"so \boxed{{42}}{end}", f"so\n#### 42{end}"]
    [found] = check_labels("math", labels, column="answer", origin=lambda row: f"row {row}")
    assert not found.fails
    assert "1 of 4" in found.seen and "row 1, column 'answer'" in found.seen
    grades = [grade_math("42", label) for label in labels[2:]]
    assert (grade_math("43", labels[1]), grades) == (0.0, [1.0, 1.0])


def test_any_answer_in_a_list_of_labels_is_accepted() -> None:
    assert [grade_math(rf"\boxed{{{answer}}}", [42, "43"]) for answer in (42, 43, 44)] == [
        1.0,
        1.0,
        0.0,
    ]
    assert grade_math(r"\boxed{7}", 7) == 1.0


@pytest.mark.parametrize("label", [each for name, each in UNREADABLE if name == "math"])
def test_math_label_without_an_answer_raises_an_error(label: Any) -> None:
    with pytest.raises(ValueError):
        grade_math("42", label)
