"""Is the answer to a mathematical question right? String rules first, then math-verify.

`grade_answer` compares two answers by the rules that reward functions written for OpenRLHF rely on;
`grade_math` grades a whole response. An odd answer (9^{9^9}) takes seconds, so run both in a user
process: math-verify stops itself by a signal, which only a main thread gets, and functions run in
the main thread there.
"""

import logging
import re
import threading
from typing import Any

from math_verify import parse, verify

from openrlhf.config.flags import toml_beside
from openrlhf.rewards.labels import math_answers

SYMBOLIC_SECONDS = 5  # for reading, and again for comparing, a pair of answers
LONGEST_ANSWER = 1000  # characters; more is not read: a babbling policy is to cost little
logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings repeat the whole response

TABLES = toml_beside(__file__)
SPELLING, VALUE = (
    TABLES["latex"] + TABLES["spelling"],
    TABLES["words"] + TABLES["latex"] + TABLES["value"],
)
_MIXED = re.compile(r"(?<![\w^.])(\d+) +(\d+)/(\d+)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
_GSM8K = re.compile(r"####\s*\$?\s*(-?[\d,./]*\d)")
_FRACTION = re.compile(r"-?\d+/\d+")
_INTEGER = re.compile(r"-?\d+")
_HEAVY_POWER = re.compile(r"\^[{(]|\^\d\d|\^\d\^")
_COMMAND = re.compile(r"\\[a-z]+|sqrt|frac")


def extract_boxed_answer(text: str | None) -> str | None:
    r"""What the last `\boxed{…}` or `\fbox{…}` with balanced braces holds, or None.

    `so \boxed{\frac{1}{2}}.` → `\frac{1}{2}`
    """
    open_braces: list[re.Match[str]] = []
    last: tuple[int, int] | None = None  # where its content starts and ends
    for brace in _BRACE.finditer(text or ""):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening[0] != "{" and (last is None or opening.end() > last[0]):
                last = opening.end(), brace.start()
    return text[slice(*last)].strip() if text and last else None


def gsm8k_answer(text: str) -> str | None:
    """The number after the last `####`, as GSM8K marks its answers, without commas; or None."""
    found = _GSM8K.findall(text)
    return found[-1].replace(",", "") if found else None


def grade_answer(given: str | None, truth: str | None) -> bool:
    """Whether `given` is `truth`: equal up to spelling, or of equal value part by part.

    Fractions have to match as written (2/4 is not 1/2) and an integer is matched by integers only;
    other parts are compared symbolically if they hold at most two different letters and no
    exponent above 9. None and overlong answers are wrong.
    """
    if given is None or truth is None or len(given) > LONGEST_ANSWER:
        return False
    if _rewrite(given, SPELLING) == _rewrite(truth, SPELLING):
        return True
    given, truth = _value(given), _value(truth)
    if given == truth:
        return True
    ours, theirs = _parts(given), _parts(truth)
    if len(ours) != len(theirs) or (
        len(theirs) > 1 and (given[0], given[-1]) != (truth[0], truth[-1])
    ):
        return False
    return bool(given) and all(
        _same_value(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def grade_math(response: str, label: Any) -> float:
    r"""1.0 if the response's final answer is the label's, or one of those in a list of labels, else
    0.0.

    The final answer is what the last box holds, else what follows `####`, else what math-verify
    finds in the last 1,000 characters (a formula or number, rather after "answer"). A label is a
    bare answer (`72`, `\frac{1}{2}`) or a solution with a box or `####` in it. Raises ValueError
    for a label without an answer.
    """
    for right in math_answers(label):
        if grade := _grade_one(response, right):
            return grade
    return 0.0


def _grade_one(response: str, label: str) -> float:
    truth = extract_boxed_answer(label) or gsm8k_answer(label) or label.strip()
    answer = extract_boxed_answer(response) or gsm8k_answer(response)
    if grade_answer(answer, truth):
        return 1.0
    if answer is not None and len(answer) > LONGEST_ANSWER:
        return 0.0
    if re.fullmatch(
        r"(\\text\{)?[A-Za-z][A-Za-z .'-]+\}?", truth
    ):  # a word is no product of its letters
        return 0.0
    found = (
        parse(response[-LONGEST_ANSWER:], parsing_timeout=_seconds())
        if answer is None
        else _parse(answer)
    )
    return float(verify(_parse(truth), found, timeout_seconds=_seconds()))


def _value(text: str) -> str:
    """An answer as its value is compared: mixed numbers as fractions, no spaces, no capitals."""
    text = _MIXED.sub(
        lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", _rewrite(text, VALUE)
    )
    return "".join(text.split()).lower()


def _rewrite(text: str, rules: list[list[str]]) -> str:
    text = text.strip()
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _parts(text: str) -> list[str]:
    """(1,2] → [1, 2]; anything that is not a flat list in brackets is one part."""
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("()[]"):
        return inner.split(",")
    return [text]


def _same_value(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(truth):
        return False
    if bool(_INTEGER.fullmatch(given)) != bool(_INTEGER.fullmatch(truth)):
        return False
    letters = {letter for letter in _COMMAND.sub("", given + truth) if letter.isalpha()}
    if len(letters) > 2 or _HEAVY_POWER.search(given) or _HEAVY_POWER.search(truth):
        return False
    return verify(_parse(truth), _parse(given), float_rounding=15, timeout_seconds=_seconds())


def _parse(answer: str) -> list[Any]:
    return parse(rf"\boxed{{{answer}}}", parsing_timeout=_seconds())


def _seconds() -> int:
    """The time limit math-verify can keep: none, which it writes 0, outside the main thread."""
    return SYMBOLIC_SECONDS if threading.current_thread() is threading.main_thread() else 0
