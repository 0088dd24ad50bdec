"""Grading of answers to mathematical questions: string rules first, then math-verify.

`grade_answer` compares two answers by the rules that reward functions written for OpenRLHF rely on;
`grade_math` grades a whole response. An unusual answer (9^{9^9}) takes seconds, so run both in a
user process: math-verify stops itself by a signal, which only a main thread receives, and functions
run in the main thread there.
"""

import logging
import re
import threading
from typing import Any

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from math_verify import parse, verify

from openrlhf.config.flags import toml_beside
from openrlhf.rewards.labels import math_answers

SYMBOLIC_SECONDS = 5  # for reading, and again for comparing, a pair of answers
# Characters. Longer answers are not parsed, so that a babbling policy costs little.
LONGEST_ANSWER = 1000
logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings repeat the whole response

TABLES = toml_beside(__file__)
SPELLING_RULES = TABLES["signs"] + TABLES["spelling"]
VALUE_RULES = TABLES["signs"] + TABLES["value"]
# Not its units, among which are variables such as t.
NORMAL_FORM = NormalizationConfig(malformed_operators=True, boxed="none")
_MIXED = re.compile(r"(?<![\w^.])(\d+) +(\d+)/(\d+)")
# math-verify's extraction joins neighbouring boxes, and reads a box that has no end.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
_GSM8K = re.compile(r"####\s*\$?\s*(-?[\d,./]*\d)")
_FRACTION = re.compile(r"-?\d+/\d+")
_INTEGER = re.compile(r"-?\d+")
_HEAVY_POWER = re.compile(r"\^[{(]|\^\d\d|\^\d\^")
_WORD = re.compile(r"(\\text\{)?[A-Za-z][A-Za-z .'-]+\}?")
_COMMAND = re.compile(r"\\[a-z]+|sqrt|frac")


def extract_boxed_answer(text: str | None) -> str | None:
    r"""Return the content of the last `\boxed{…}` or `\fbox{…}` with balanced braces, or None.

    `so \boxed{\frac{1}{2}}.` → `\frac{1}{2}`
    """
    open_braces: list[re.Match[str]] = []
    content: slice | None = None  # of the last box so far
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
    """Return the number after the last `####` (GSM8K's mark), without commas, or None."""
    found = _GSM8K.findall(text)
    if not found:
        return None
    return found[-1].replace(",", "")


def grade_answer(given: str | None, truth: str | None) -> bool:
    """Return whether `given` equals `truth` up to spelling, or in value part by part.

    Fractions must match as written (2/4 is not 1/2), and only an integer matches an integer. Other
    parts are compared symbolically if they hold at most two different letters and no exponent above
    9. None and overlong answers are wrong.
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
    if len(true_parts) > 1:
        same_brackets = given[0] == truth[0] and given[-1] == truth[-1]
        if not same_brackets:
            return False
    return all(map(_same_value, given_parts, true_parts))


def grade_math(response: str, label: Any) -> float:
    r"""Return 1.0 if the response's final answer is the label, or in the list of labels, else 0.0.

    The final answer is the content of the last box, else the number after `####`, else the formula
    or number that math-verify finds in the last 1,000 characters (preferably after "answer"). A
    label is a bare answer (`72`, `\frac{1}{2}`) or a solution with a box or `####` in it. Raises
    ValueError for a label without an answer.
    """
    for truth in math_answers(label):
        if grade := _grade_one(response, truth):
            return grade
    return 0.0


def _grade_one(response: str, label: str) -> float:
    truth = extract_boxed_answer(label) or gsm8k_answer(label) or label.strip()
    answer = extract_boxed_answer(response) or gsm8k_answer(response)
    if grade_answer(answer, truth):
        return 1.0
    if answer is not None and len(answer) > LONGEST_ANSWER:
        return 0.0
    if _WORD.fullmatch(truth):  # math-verify would read a word as the product of its letters
        return 0.0
    if answer is None:
        found = parse(response[-LONGEST_ANSWER:], parsing_timeout=_seconds())
    else:
        found = _parse(answer)
    return float(verify(_parse(truth), found, timeout_seconds=_seconds()))


def _value(text: str) -> str:
    """Normalize an answer: mixed numbers as fractions, no spaces, no capitals."""
    text = _MIXED.sub(_as_fraction, _rewrite(text, VALUE_RULES))
    return "".join(text.split()).lower()


def _as_fraction(mixed: re.Match[str]) -> str:
    whole, numerator, denominator = mixed.groups()
    return f"{int(whole) * int(denominator) + int(numerator)}/{denominator}"


def _rewrite(text: str, rules: list[list[str]]) -> str:
    text = normalize_latex(text, NORMAL_FORM)
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _parts(text: str) -> list[str]:
    """Split a flat list in brackets, (1,2] → [1, 2]; return anything else as one part."""
    inner = text[1:-1]
    is_bracketed = len(text) > 2 and text[0] in "([" and text[-1] in ")]"
    is_flat = not set(inner) & set("()[]")
    if is_bracketed and is_flat:
        return inner.split(",")
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
    if len(letters) > 2 or _HEAVY_POWER.search(given) or _HEAVY_POWER.search(truth):
        return False
    return verify(_parse(truth), _parse(given), float_rounding=15, timeout_seconds=_seconds())


def _parse(answer: str) -> list[Any]:
    return parse(rf"\boxed{{{answer}}}", parsing_timeout=_seconds())


def _seconds() -> int:
    """Return the time limit for math-verify: 0, that is none, outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        return SYMBOLIC_SECONDS
    return 0
