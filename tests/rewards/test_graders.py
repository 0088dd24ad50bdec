"""Pairs of answers that the graders treat as equal or different. Each row can be checked by eye."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from openrlhf.rewards.graders import extract_boxed_answer, grade_answer, grade_math, gsm8k_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{6} but then \boxed{7", "6"),
        (r"{ } } { \boxed{8}", "8"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed{9", None),
        ("", None),
        (None, None),
    ],
)
def test_boxed_answer_comes_from_the_last_box_with_balanced_braces(
    text: str | None, answer: str | None
):
    assert extract_boxed_answer(text) == answer


@pytest.mark.timeout(60)
def test_response_full_of_unclosed_boxes_takes_linear_time():
    assert extract_boxed_answer(r"\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("it is\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### $5", "5"),
        ("#### -3.", "-3"),
        ("#### 1\n#### 2", "2"),
        ("72", None),
    ],
)
def test_gsm8k_answer_is_the_number_after_four_hashes(text: str, answer: str | None):
    assert gsm8k_answer(text) == answer


SAME_SPELLING = [
    ("5", "5"),
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\tfrac1{72}", r"\frac{1}{72}"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", "1/2"),
    (".5", "0.5"),
    ("-.5", "-0.5"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\left(1,2\right)", "(1, 2)"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"\$18", "18"),
    (r"50\%", "50"),
    (r"5\text{ cm}", "5"),
    ("x=5", "5"),
    ("5", "k = 5"),
    ("1\n0\\!0", "100"),
    ("\\\\frac{3}{4}", r"\frac{3}{4}"),
]
SAME_VALUE = [
    (r"\text{Monday}", "monday"),
    ("1,000", "1000"),
    ("2.0", "2"),
    ("1,234,567.00", "1234567"),
    ("5 centimeters", "5"),
    ("5 cm^2", "5"),
    ("7 feet", "7"),
    ("3 million", "3*10^6"),
    ("2 trillion", r"2*10^{12}"),
    ("1 or 2", "1,2"),
    (r"1 \text{ and } 2", "1, 2"),
    ("{4}", "4"),
    ("1 1/2", "3/2"),
    (r"1\frac{1}{2}", "1.5"),
    ("-1 1/2", "-3/2"),
    ("0.25", "1/4"),
    ("2.5", r"\frac{5}{2}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("sqrt(3)/2", r"\frac{\sqrt{3}}{2}"),
    (r"\frac{2}{3}\pi", r"\frac{2\pi}{3}"),
    (r"\frac{1}{2}x", r"\frac{x}{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("y+x", "x+y"),
    ("(1/2,3)", r"(\frac{1}{2}, 3)"),
    ("[1, 2.0)", "[1,2)"),
    ("007", "7"),
    ("1{,}000", "1000"),
    ("50 percent", r"50\%"),
    (r"\textbf{Monday}", "Monday"),
    ("(-inf, 2]", r"(-\infty,2]"),
]
DIFFERENT = [
    ("5", "6"),
    ("2/4", "1/2"),  # fractions must match as written
    ("4/2", "2"),  # an integer matches only an integer
    ("3 million", "3000000"),
    ("50%", "0.5"),
    ("0.333333", "1/3"),
    ("(1,2)", "[1,2]"),
    ("(2,1)", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    ("1", "(1,2)"),
    ("yadnom", "monday"),
    ("a+b+c", "c+b+a"),  # more than two distinct letters
    ("2^{100}", "4^{50}"),  # exponents above 9
    ("9^{9^{9}}", "1/3"),
    ("", "0"),
    ("3 dogs", "3"),
    ("10", "1"),
    ("1" * 2000, "1" * 2000),
    (None, "1"),
    ("1", None),
    (None, None),
]


@pytest.mark.parametrize(("given", "truth"), SAME_SPELLING)
def test_answers_in_different_notation_are_equal(given: str, truth: str):
    assert grade_answer(given, truth) and grade_answer(truth, given)


@pytest.mark.parametrize(("given", "truth"), SAME_VALUE)
def test_answers_with_the_same_value_are_equal(given: str, truth: str):
    assert grade_answer(given, truth) and grade_answer(truth, given)


@pytest.mark.parametrize(("given", "truth"), DIFFERENT)
def test_different_answers_are_not_equal(given: str | None, truth: str | None):
    assert not grade_answer(given, truth)


@pytest.mark.parametrize(
    ("response", "label", "grade"),
    [
        (r"We get \boxed{72}.", "72", 1.0),
        (r"We get \boxed{72}.<|im_end|>", "She sold 48+24 = 72.\n#### 72", 1.0),
        ("so\n#### 1,000", "1000", 1.0),
        ("That is 18 dollars.\nA: 18", "18", 1.0),
        ("That is 18 dollars.\nA: 19", "18", 0.0),
        ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
        (r"\fbox{3}", r"we know \boxed{3}", 1.0),
        (r"\boxed{2/4}", r"\frac{1}{2}", 1.0),
        (r"\boxed{2,1}", "1,2", 1.0),
        (r"\boxed{x \in (1,2)}", "(1,2)", 1.0),
        (r"\boxed{\text{Monday}}", "Monday", 1.0),
        (r"\boxed{yadnoM}", "Monday", 0.0),
        (r"\boxed{5} or \boxed{6}", "5", 0.0),
        (r"\boxed{" + "9^{" * 300 + "9" + "}" * 301, "5", 0.0),
        ("I do not know.", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_response_is_graded_on_its_final_answer(response: str, label: str, grade: float):
    assert grade_math(response, label) == grade


@pytest.mark.timeout(60)
def test_long_nonsense_response_is_graded_quickly_and_not_logged(capfd: pytest.CaptureFixture[str]):
    for babble in (
        "1 " * 50_000,
        "$" * 50_000,
        r"\[" * 50_000,
        "(1+" * 50_000,
        r"\boxed{" + "1 " * 450 + "}",
    ):
        assert grade_math(babble, "72") == 0.0
    assert capfd.readouterr().err == ""


def test_grading_works_outside_the_main_thread():
    grades: list[float] = []
    thread = threading.Thread(target=lambda: grades.append(grade_math(r"\boxed{0.25}", r"\frac14")))
    thread.start()
    thread.join()
    assert grades == [1.0]


def test_utils_exports_graders_lazily():
    script = (
        "import sys, openrlhf.utils\n"
        "assert not {'sympy', 'math_verify', 'torch'} & set(sys.modules)\n"
        "from openrlhf.utils import extract_boxed_answer, grade_answer\n"
        "assert grade_answer(extract_boxed_answer(r'\\boxed{0.5}'), '1/2')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    import openrlhf.utils

    with pytest.raises(AttributeError, match="no attribute 'grade_essay'"):
        openrlhf.utils.grade_essay  # noqa: B018
