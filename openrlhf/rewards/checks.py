"""Built-in rewards that check a response's format, length or code against its label.

The `math` verifier is in `graders`. Each verifier takes a response without special tokens, and the
response's label. Verifiers run in a user process, so that --reward.timeout also limits a label's
regular expression.
"""

import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openrlhf.isolation.sandbox import run_program
from openrlhf.rewards.assertions import read_assertions

TEST_SECONDS = 10.0  # CPU time limit of one test
LEAST_TEST_SECONDS = 0.1  # minimum remaining time for starting another test
PART_OF_TIMEOUT = (
    0.8  # share of the call's timeout for all tests; the rest is for starting sandboxes
)
# Language tags of the fenced code blocks that may contain the program.
PYTHON_BLOCKS = ("python", "python3", "py", "")
_FENCED = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_RANGE = re.compile(r"\s*(?:(\d+)\s*-\s*)?(\d+)\s*")

# This program runs inside the sandbox. It evaluates calls and prints their values as JSON.
# The values have the format read by `assertions.plain`.
# The token is printed only if all earlier lines were executed.
_HARNESS = """
import json, os, sys
program, setup, calls, token = json.load(sys.stdin)
write, dumps, output = os.write, json.dumps, os.dup(1)
def form(value):
    if isinstance(value, int) and abs(value) >= 2**63:
        return {"int": hex(value)}
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, list):
        return [form(each) for each in value]
    for kind in tuple, set, frozenset:
        if isinstance(value, kind):
            return {kind.__name__: [form(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[form(key), form(entry)] for key, entry in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "__iter__"):
        kind = "tuple" if hasattr(value, "__len__") else "iterator"
        return {kind: [form(each) for each in value]}
    for number in "__index__", "__float__":
        try:
            return form(getattr(value, number)())
        except (AttributeError, TypeError):
            pass
    return {"other": bool(value)}
names = {"__name__": "solution", "__loads__": json.loads, "__dumps__": json.dumps}
exec(compile(program, "solution.py", "exec"), names)
exec(compile(setup, "tests.py", "exec"), names)
values = [form(eval(call, names)) for call in calls]
write(output, (token + dumps(values)).encode())
"""


def label_text(label: Any) -> str:
    """Return a label as text, to be read by a verifier."""
    if isinstance(label, str):
        return label
    return json.dumps(label)


def grade_format(response: str, label: Any) -> float:
    """Return 1.0 if the entire response matches the label, else 0.0.

    The label is a regular expression in which `.` also matches line breaks. An empty label requires
    a single `<think>…</think>` block followed by an answer; the prompt may already end with the
    opening tag.
    """
    if pattern := label_text(label):
        return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)
    thought, _, answer = response.partition("</think>")
    rest = thought.strip().removeprefix("<think>") + answer
    return float(bool(answer.strip()) and "<think>" not in rest and "</think>" not in rest)


def grade_length(response: str, label: Any) -> float:
    """Return 1.0 if the number of words is in the label's range: `200` (at most 200) or `100-200`.

    Outside the range, the reward falls linearly and reaches 0 at zero words or at twice the upper
    bound.
    """
    low, high = word_bounds(label)
    words = len(response.split())
    if words < low:
        return words / low
    return max(0.0, 1 - max(0, words - high) / high)


def word_bounds(label: Any) -> tuple[int, int]:
    """Return the minimum and maximum number of words allowed by a label. Raises ValueError."""
    text = label_text(label)
    problem = (
        "--reward.verifier length expects a number of words or a range as label, such as 200 or "
        f"100-200, not {text[:200]!r}"
    )
    bounds = _RANGE.fullmatch(text)
    if bounds is None:
        raise ValueError(problem)
    low = int(bounds[1] or 0)
    high = int(bounds[2])
    if high < max(1, low):
        raise ValueError(problem)
    return low, high


@dataclass(frozen=True, kw_only=True)
class CodeTest:
    """A test of a program: its standard input, or calls to its functions.

    `holds` returns whether the program's output or the values of the calls are correct.
    """

    holds: Callable[[str], bool]
    stdin: str | None = None
    setup: str = ""  # statements to execute after the program and before the calls
    calls: Sequence[str] = ()


def read_tests(label: Any) -> list[CodeTest]:
    """Parse a label, which is JSON with "tests", or with "inputs" and "outputs".

    Raises ValueError for any other label. The two forms are `{"tests": "assert …", "entry": name}`
    and `{"inputs": […], "outputs": […], "fn_name": name}`.
    """
    text = label_text(label)
    given = _value(text)
    if not isinstance(given, Mapping) or not (given.get("tests") or given.get("inputs")):
        raise ValueError(
            '--reward.verifier code expects a JSON label with "tests", or with "inputs" and '
            f'"outputs", not {text[:200]!r}'
        )
    name = given.get("fn_name") or given.get("entry") or ""
    if asserts := given.get("tests"):
        if not isinstance(asserts, str):
            asserts = "\n".join(asserts)
        if name and "def check(" in asserts:
            asserts += f"\ncheck({name})"
        if outside := read_assertions(asserts, name):
            return [CodeTest(calls=outside.calls, holds=outside.hold)]
        return [CodeTest(setup=asserts, holds=lambda _: True)]
    inputs = given["inputs"]
    outputs = given.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the label has {len(inputs)} inputs and {len(outputs)} outputs: {text[:200]!r}"
        )
    tests: list[CodeTest] = []
    for stdin, expected in zip(inputs, outputs, strict=True):
        if name:
            tests.append(_call_test(name, stdin, expected))
        else:
            holds = partial(same_output, expected=_text(expected))
            tests.append(CodeTest(stdin=_text(stdin), holds=holds))
    return tests


def _call_test(name: str, given: Any, expected: Any) -> CodeTest:
    """Return the test of a function, which may be a method of a class named `Solution`."""
    arguments = given
    if isinstance(given, str):  # the output has one JSON value per line
        arguments = [_value(line) for line in given.splitlines()]
    if not isinstance(arguments, list):
        raise ValueError(
            f"--reward.verifier code expects a list of arguments for each call of {name}, not "
            f"{given!r:.200}"
        )
    function = f"(Solution().{name} if 'Solution' in globals() else {name})"
    return CodeTest(
        calls=[f"__dumps__({function}(*__loads__({json.dumps(arguments)!r})))"],
        holds=partial(_returned, expected=_value(expected)),
    )


def _returned(values: str, expected: Any) -> bool:
    try:
        [returned], _ = json.JSONDecoder().raw_decode(values)
        returned = json.loads(returned)
    except (TypeError, ValueError):  # the program has replaced `__dumps__`
        return False
    return returned == expected or [returned] == expected


def grade_code(response: str, label: Any, timeout: float) -> dict[str, Any]:
    """Return reward 1.0 if the program in the response passes all tests in its label, else 0.0.

    The fraction of passed tests is logged. The remaining tests count as failed once a test times
    out, or once the tests have used up the fraction `PART_OF_TIMEOUT` of `timeout` (seconds).
    """
    tests = read_tests(label)
    program = program_in(response)
    passed = 0
    deadline = time.monotonic() + PART_OF_TIMEOUT * timeout
    for test in tests:
        # A program's wall-clock limit is twice its CPU time limit.
        seconds = min(TEST_SECONDS, (deadline - time.monotonic()) / 2)
        if seconds <= LEAST_TEST_SECONDS:
            break
        is_passed, is_late = _passes(program, test, seconds)
        if is_passed:
            passed += 1
        if is_late:
            break
    fraction = passed / len(tests)
    return {"rewards": float(fraction == 1), "extra_logs": {"tests_passed": fraction}}


def program_in(response: str) -> str:
    """Return the last fenced (```) block, untagged or tagged Python, or the full response."""
    program = response
    for language, block in _FENCED.findall(response):
        if language.lower() in PYTHON_BLOCKS:
            program = block
    return program


def _passes(program: str, test: CodeTest, seconds: float) -> tuple[bool, bool]:
    """Return whether the program passes one test, and whether the test timed out."""
    if test.stdin is not None:
        ran = run_program(program, test.stdin, seconds=seconds)
        return ran.ok and test.holds(ran.output), ran.late
    token = secrets.token_hex(16)
    question = json.dumps([program, test.setup, test.calls, token])
    ran = run_program(_HARNESS, question, seconds=seconds)
    _, reached, values = ran.output.partition(token)
    return bool(ran.ok and reached) and test.holds(values), ran.late


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs contain the same words in the same order.

    Expected numbers with a decimal point are matched to within 1e-6.
    """
    words = output.split()
    expected_words = expected.split()
    if len(words) != len(expected_words):
        return False
    return all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in expected:
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _text(value: Any) -> str:
    """Return a test's input or output as text. Some datasets store the text as a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _value(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
