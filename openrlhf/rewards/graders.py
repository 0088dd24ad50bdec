"""Grades math answers: string rules first, then math-verify.

`grade_answer` compares two answers by the rules that reward functions written for OpenRLHF expect.
`grade_math` grades a full response. An unusual answer such as 9^{9^9} takes seconds, so both
functions must run in a user process. A user process calls functions in its main thread, as
math-verify's signal-based timeout requires.
"""

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from math_verify import parse, verify

from openrlhf.rewards.labels import math_answers

SYMBOLIC_SECONDS = 5  # time limit of each call to math-verify
# Maximum length in characters.
# Longer answers are not parsed, so that grading a rambling policy stays cheap.
LONGEST_ANSWER = 1000
logging.getLogger("math_verify").setLevel(logging.ERROR)  # warnings repeat the full response

# Rules that rewrite answers in math-verify's normal form before they are compared, in order.
# A rule is a regular expression and its replacement.
# Symbols that do not change the value.
SIGNS = [
    (r"\^\s*\{?\\circ\}?", ""),
    (r"\\?[%$]", ""),
]
# Rules to compare answers as text: unify notation.
SPELLING_RULES = [
    *SIGNS,
    (r"\\text\{ [^{}]*\}\s*$", ""),
    ("^[^=]{1,2}=(?=[^=]*$)", ""),
    (r"\s+", ""),
]
# Rules to compare answers by value: remove what does not change the value, and unify numbers.
VALUE_RULES = [
    *SIGNS,
    (r"\\text\{([^{}]*)\}", r"\1"),
    (r"\s*\bmillion\b", "*10^6"),
    (r"\s*\bbillion\b", "*10^9"),
    (r"\s*\btrillion\b", "*10^{12}"),
    (
        r"(?<![a-zA-Z\\])(?:(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month"
        r"|year|yard)s?|foot|feet|inch(?:es)?)(?![a-zA-Z])(?:\s*\^\s*\{?\d\}?)?",
        "",
    ),
    (r"^\s*\{(.*)\}\s*$", r"\1"),
    (r"(?<=\d),(?=\d{3}(?!\d))(?![^(\[]*[)\]])", ""),
    (r"(?<![\d.])(\d+)\.0*(?!\d)", r"\1"),
    (r"(?<![^\s\d(\[,-])\\frac\{(-?\d+)\}\{(\d+)\}(?=\s*(?:$|[,)\]]))", r" \1/\2"),
    (r"\^\{(\w)\}", r"^\1"),
]
# math-verify's removal of units is off, because it would also remove variables such as t.
NORMAL_FORM = NormalizationConfig(malformed_operators=True, boxed="none")
_MIXED = re.compile(r"(?<![\w^.])(\d+) +(\d+)/(\d+)")
# Boxes are extracted here: math-verify would join adjacent boxes and accept unclosed boxes.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
_GSM8K = re.compile(r"####\s*\$?\s*(-?[\d,./]*\d)")
_FRACTION = re.compile(r"-?\d+/\d+")
_INTEGER = re.compile(r"-?\d+")
_LIST = re.compile(r"[(\[]([^()\[\]]+)[)\]]")
_HEAVY_POWER = re.compile(r"\^[{(]|\^\d\d|\^\d\^")
_WORD = re.compile(r"(\\text\{)?[A-Za-z][A-Za-z .'-]+\}?")
_COMMAND = re.compile(r"\\[a-z]+|sqrt|frac")


def extract_boxed_answer(text: str | None) -> str | None:
    r"""Return the content of the last `\boxed{…}` or `\fbox{…}` with balanced braces, or None.

    `so \boxed{\frac{1}{2}}.` → `\frac{1}{2}`
    """
    open_braces: list[re.Match[str]] = []
    content: slice | None = None  # content of the last box so far
    for brace in _BRACE.finditer(text or ""):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            is_box = opening[0] != "{"
            if is_box and (content is None or opening.end() > content.start):
                content = slice(opening.end(), brace.start())
    if text is None or content is None:
        return None
    return text[content].strip()


def gsm8k_answer(text: str) -> str | None:
    """Return the number after the last `####` (GSM8K's answer marker), without commas, or None."""
    found = _GSM8K.findall(text)
    if not found:
        return None
    return found[-1].replace(",", "")


def grade_answer(given: str | None, truth: str | None) -> bool:
    """Return whether `given` equals `truth` in normalized form, or part by part in value.

    Fractions must match as written (2/4 does not match 1/2), and only an integer matches an
    integer. Other parts are compared symbolically if they contain at most two distinct letters and
    no exponent above 9. None and answers above `LONGEST_ANSWER` are wrong.
    """
    if given is None or truth is None or len(given) > LONGEST_ANSWER:
        return False
    if _rewrite(given, SPELLING_RULES) == _rewrite(truth, SPELLING_RULES):
        return True
    given = _value(given)
    truth = _value(truth)
    if given == truth:
        return True
    if not given:
        return False
    given_parts = _parts(given)
    true_parts = _parts(truth)
    if len(given_parts) != len(true_parts):
        return False
    if len(true_parts) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):  # brackets
        return False
    return all(map(_same_value, given_parts, true_parts))


def grade_math(response: str, label: Any) -> float:
    r"""Return 1.0 if the response's final answer equals the label or any of its items, else 0.0.

    The final answer is the content of the last box or, without a box, the number after `####`.
    Otherwise, the final answer is the formula or number that math-verify finds in the last 1,000
    characters (preferably after "answer"). A label is a bare answer (`72`, `\frac{1}{2}`), a
    solution that contains a box or `####`, or a list of answers and solutions. Raises ValueError
    for a label without an answer.
    """
    return float(any(_is_correct(response, truth) for truth in math_answers(label)))


def _is_correct(response: str, label: str) -> bool:
    truth = extract_boxed_answer(label) or gsm8k_answer(label) or label.strip()
    answer = extract_boxed_answer(response) or gsm8k_answer(response)
    if grade_answer(answer, truth):
        return True
    # math-verify would read a word as the product of its letters.
    if _WORD.fullmatch(truth) or len(answer or "") > LONGEST_ANSWER:
        return False
    if answer is None:
        found = parse(response[-LONGEST_ANSWER:], parsing_timeout=_seconds())
    else:
        found = _parse(answer)
    return verify(_parse(truth), found, timeout_seconds=_seconds())


def _value(text: str) -> str:
    """Convert mixed numbers to fractions, remove spaces, and convert to lower case."""
    text = _MIXED.sub(_as_fraction, _rewrite(text, VALUE_RULES))
    return "".join(text.split()).lower()


def _as_fraction(mixed: re.Match[str]) -> str:
    whole, numerator, denominator = mixed.groups()
    return f"{int(whole) * int(denominator) + int(numerator)}/{denominator}"


def _rewrite(text: str, rules: Sequence[tuple[str, str]]) -> str:
    text = normalize_latex(text, NORMAL_FORM)
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _parts(text: str) -> list[str]:
    """Split a flat list in brackets, (1,2] → [1, 2]; return anything else as one part."""
    if found := _LIST.fullmatch(text):
        return found[1].split(",")
    return [text]


def _same_value(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(truth):
        return False
    if bool(_INTEGER.fullmatch(given)) != bool(_INTEGER.fullmatch(truth)):
        return False
    text = _COMMAND.sub("", given + truth)
    letters = set(filter(str.isalpha, text))
    if len(letters) > 2 or _HEAVY_POWER.search(f"{given} {truth}"):
        return False
    return verify(_parse(truth), _parse(given), float_rounding=15, timeout_seconds=_seconds())


def _parse(answer: str) -> list[Any]:
    return parse(rf"\boxed{{{answer}}}", parsing_timeout=_seconds())


def _seconds() -> int:
    """Return math-verify's time limit, which is 0 (no limit) outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        return SYMBOLIC_SECONDS
    return 0
