"""Tests for assertions in labels, and for programs that try to cheat.

Assertions are checked outside the program's process.
"""

from __future__ import annotations

import json

import pytest

from openrlhf.rewards.assertions import read_assertions
from openrlhf.rewards.checks import grade_code


def reward(program: str, tests: str, entry: str = "square") -> float:
    label = json.dumps({"tests": tests, "entry": entry})
    return grade_code(f"```python\n{program}\n```", label, 60)["rewards"]


RIGHT = "def square(x):\n    return x * x\n"
OUTSIDE = {
    "compared": "assert square(7) == 49\nassert square(9) == 81, 'message'",
    "near": "import math\nassert abs(square(7) - 49) < 1e-6\nassert math.isclose(square(9), 81)",
    "by check": (
        "METADATA = {'author': 'x'}\n\n\n"
        "def check(candidate):\n"
        "    assert True\n"
        "    assert candidate(7) == 49"
    ),
}
ALWAYS_EQUAL = """
class Anything(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __sub__(self, other): return Anything()
    def __abs__(self): return Anything()
    def __float__(self): return float("nan")
    def __hash__(self): return 0
    __gt__ = __le__ = __ge__ = __rsub__ = __lt__
def square(x): return Anything()
"""
PATCHED = """
import builtins, json, math
class Anything:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return self
    def __getitem__(self, key): return self
math.isclose = json.dumps = lambda *_: "true"
for name in "abs", "all", "sorted", "eval":
    setattr(builtins, name, lambda *_: Anything())
def square(x): return Anything()
"""
FRAMES = r"""
import gc, re, sys
def square(x):
    frame, texts = sys._getframe(), []
    while frame:
        held = [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        texts += [repr(each) for each in held if isinstance(each, (str, list, tuple))]
        frame = frame.f_back
    texts += [repr(each) for each in gc.get_objects() if isinstance(each, (list, tuple)) and len(each) < 100]
    found = re.findall(r"\(%d\)\)? *(?:==|-|,) *(\d+)" % x, " ".join(texts))
    return int(found[0]) if found else 0
"""  # noqa: E501
TOKEN = """
import os, sys
def square(x):
    frame = sys._getframe()
    while frame:
        for held in list(frame.f_globals.values()):
            if isinstance(held, str) and len(held) == 32:
                os.write(1, (held + "[true, true]").encode())
        frame = frame.f_back
    os._exit(0)
"""
CHEATS = {"equal": ALWAYS_EQUAL, "patched": PATCHED, "frames": FRAMES, "token": TOKEN}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
@pytest.mark.parametrize("tests", OUTSIDE.values(), ids=OUTSIDE)
def test_cheating_program_fails_and_correct_program_passes(tests: str, cheat: str) -> None:
    assert reward(cheat, tests) == 0.0
    assert reward(RIGHT, tests) == 1.0


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("{'a': (1, [2.5, None]), 3: {4}}", "f() == {'a': (1, [2.5, None]), 3: {4}}"),
        ("[True, b'x', 1 + 2j, 10**50, 'é\\n']", "f() == [True, b'x', 1 + 2j, 10**50, 'é\\n']"),
        ("float('inf')", "f() == float('inf')"),
        ("__import__('collections').OrderedDict(a=1)", "f() == {'a': 1}"),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", "f() == (1, 2)"),
        ("__import__('fractions').Fraction(1, 2)", "f() == 0.5"),
        ("(each for each in 'ab')", "list(f()) == ['a', 'b']"),
        ("frozenset([1])", "f() == {1}"),
        ("[3, 1]", "sorted(f())[0] == 1 and len(f()) == 2 and 3 in f()"),
        ("'Abc'", "f().lower() == 'abc'"),
        ("{frozenset([1]): {frozenset([2])}}", "f() == {frozenset([1]): {frozenset([2])}}"),
        ("__import__('re').match('a', 'abc')", "f() and f() is not None and f() != 3"),
        ("not __import__('re').match('b', 'abc')", "f()"),
        ("__import__('numpy').array([2, 3])", "list(f()) == [2, 3] and len(f()) == 2"),
        ("__import__('numpy').float64(2.5)", "f() == 2.5"),
        ("__import__('numpy').bool_(True)", "f() == True"),
        ("range(3)", "list(f()) == [0, 1, 2] and f()[1] == 1"),
        ("2**20000", "f() == 2**20000"),
        ("__import__('enum').IntEnum('Color', 'RED')['RED']", "f() == 1"),
    ],
)
def test_values_that_are_equal_inside_the_program_are_equal_outside_it(
    value: str, test: str
) -> None:
    assert read_assertions(f"assert {test}", "")
    assert reward(f"def f(): return {value}", f"assert {test}") == 1.0


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("(1, 2)", "f() == [1, 2]"),
        ("'1'", "f() == 1"),
        ("'1'", "f() > 1"),
        ("(each for each in 'ab')", "f() == ['a', 'b']"),
        ("object()", "f() == 1"),
        ("range(3)", "f() == [0, 1, 2]"),
        ("[2 ** 61 * each for each in range(30_000)]", "len(f()) == 30_000"),
        ("1 / 0", "f() == 1"),
    ],
)
def test_wrong_values_fail_the_assertion(value: str, test: str) -> None:
    assert read_assertions(f"assert {test}", "")
    assert reward(f"def f(): return {value}", f"assert {test}") == 0.0


def test_method_calls_are_checked_outside_the_program() -> None:
    program = (
        "class Solution:\n"
        "    def __init__(self, k): self.k = k\n"
        "    def f(self, x): return self.k + x"
    )
    tests = "assert Solution(3).f(x=4) == 7"
    assert read_assertions(tests, "")
    assert reward(program, tests) == 1.0
    assert reward(program.replace("+", "*"), tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(f(3)) == 3",
        "assert f(3).startswith('expected')",
        "assert same(f(3), 3)",
        "assert sum(1, 2) == 3",
        "for x in range(3):\n    assert f(x) == x",
        "x = 3\nassert f(x) == 3",
        "assert f(lambda: 3) == 3",
        "assert f(3) ** 99 == 3",
        "assert list(range(f(3))) == []",
        "assert bytes(f(3)) == b''",
        "assert f(3).__class__ == int",
        "assert [x for x in f(3)] == []",
        "from math import isclose\nassert isclose(f(3), 3)",
        "def check(g):\n    assert g(3) == h(g)",
        "def check(g):\n    for x in 1, 2:\n        assert g(x) == x",
        "assert f(3) == g(3)",
        "assert f(3) == Point(3)",
        "import datetime\nassert f(3) == datetime.date(2020, 1, 3)",
        "import math\nassert f(81) == math.sqrt(81)",
        "import math\nassert math.sqrt(81) == 9",
        "assert f(2, 10) == pow(2, 10)",
        "assert pow(2, 10) == 1024",
        "assert f(3) ==",
        "assert " + "(" * 500 + "f(3)" + ")" * 500,
    ],
)
def test_assertions_that_need_more_than_values_are_checked_inside_the_program(tests: str) -> None:
    assert read_assertions(tests + "\ncheck(f)" * ("def check" in tests), "f") is None


def test_assertions_inside_the_program_distinguish_correct_from_wrong_programs() -> None:
    tests = "for x in range(3):\n    assert square(x) == x * x"
    assert reward(RIGHT, tests) == 1.0
    program = "import datetime\ndef day(n): return datetime.date(2020, 1, n)"
    assert reward(program, "import datetime\nassert day(3) == datetime.date(2020, 1, 3)") == 1.0
    assert reward(RIGHT.replace("*", "+"), tests) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[1",
        "{}",
        "[]",
        "true",
        '{"tuple": 3}',
        "[" * 100_000,
        "9" * 10_000,
        '[{"set": [[1]]}]',
        '[{"a": 1}]',
    ],
)
def test_output_that_is_not_valid_data_fails_the_assertion(answer: str) -> None:
    assertions = read_assertions("assert f(3) == 9", "")
    assert assertions
    assert not assertions.hold(answer)
    assert assertions.hold("[9] and more output")
