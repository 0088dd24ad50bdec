"""Built-in verifiers for format, length and code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.isolation.pool import ProcessPool
from openrlhf.rewards.checks import grade_code, grade_format, grade_length, program_in, same_output
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from openrlhf.rewards.rule import VerifierReward


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>two and two</think> 4", 1.0),
        ("\n<think>\nlines\n</think>\n\n4\n", 1.0),
        ("the tag was in the prompt</think>4", 1.0),
        ("<think></think>4", 1.0),
        ("4", 0.0),
        ("<think>two and two 4", 0.0),
        ("<think>two and two</think> ", 0.0),
        ("Well. <think>two and two</think> 4", 0.0),
        ("<think>a</think> b </think> 4", 0.0),
        ("<think>a</think><think>b</think> 4", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward_without_label_requires_one_think_block_before_the_answer(
    response: str, expected: float
) -> None:
    assert grade_format(response, "") == expected


@pytest.mark.parametrize(
    ("pattern", "response", "expected"),
    [
        (r"<answer>.*</answer>", " <answer>a\nb</answer>\n", 1.0),
        (r"<answer>.*</answer>", "So: <answer>4</answer>", 0.0),
        (r"\d+", "42", 1.0),
        (r"^\d+$", "42nd", 0.0),
    ],
)
def test_format_label_must_match_the_whole_response(
    pattern: str, response: str, expected: float
) -> None:
    assert grade_format(response, pattern) == expected


@pytest.mark.parametrize(
    ("label", "words", "expected"),
    [
        ("4", 0, 1.0), ("4", 4, 1.0), ("4", 5, 0.75), ("4", 8, 0.0), ("4", 100, 0.0),
        ("4-10", 3, 0.75), ("4-10", 4, 1.0), (" 4 - 10 ", 10, 1.0), ("4-10", 15, 0.5),
        ("4-10", 0, 0.0),
    ],
)  # fmt: skip
def test_length_reward_falls_linearly_outside_the_bounds(
    label: str, words: int, expected: float
) -> None:
    assert grade_length("word " * words, label) == expected


@pytest.mark.parametrize("label", ["", "short", "-3", "10-5", "0", "1.5"])
def test_length_label_that_is_not_a_number_or_range_raises_an_error(label: str) -> None:
    with pytest.raises(ValueError, match="as label, such as 200 or 100-200"):
        grade_length("word", label)


def test_program_is_taken_from_the_last_python_block_or_the_whole_response() -> None:
    assert (
        program_in("Try\n```python\nprint(1)\n```\nno:\n```py\nprint(2)\n```\nDone.")
        == "print(2)\n"
    )
    assert program_in("```\nprint(3)\n```") == "print(3)\n"
    assert (
        program_in("```bash\nls\n```\n```python\nprint(1)\n```\n```text\nout\n```") == "print(1)\n"
    )
    assert program_in("print(4)") == "print(4)"


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("123456789", "123456788", False),
        ("yes", "Yes", False),
        ("1", "1 2", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_by_word_with_tolerance_for_decimals(
    output: str, expected: str, same: bool
) -> None:
    assert same_output(output, expected) is same


def code(program: str, label: Any) -> tuple[float, float]:
    """Return the reward and the fraction of passed tests."""
    graded = grade_code(f"```python\n{program}\n```", json.dumps(label), 60)
    return graded["rewards"], graded["extra_logs"]["tests_passed"]


SQUARES = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
ASSERTS = {"tests": "assert square(2) == 4\nassert square(3) == 9"}
CALLS = {"inputs": [[2], "3"], "outputs": [4, "9"], "fn_name": "square"}
RIGHT = "def square(x):\n    return x * x\n"


@pytest.mark.parametrize(
    ("program", "label", "expected"),
    [
        ("print(int(input()) ** 2)", SQUARES, (1.0, 1.0)),
        ("print(int(input()) * 2)", SQUARES, (0.0, 0.5)),
        ("print(4)", SQUARES, (0.0, 0.5)),
        ("x = input(); y = input(); print(4)", SQUARES, (0.0, 0.0)),
        (RIGHT, ASSERTS, (1.0, 1.0)),
        (RIGHT, {"tests": ["assert square(2) == 4", "assert square(1) == 1"]}, (1.0, 1.0)),
        (RIGHT, {"tests": "def check(f):\n    assert f(5) == 25", "entry": "square"}, (1.0, 1.0)),
        ("def square(x):\n    return 4\n", ASSERTS, (0.0, 0.0)),
        (RIGHT, CALLS, (1.0, 1.0)),
        (
            (
                "class Solution:\n"
                "    def square(self, x):\n"
                "        print('noise')\n"
                "        return x * x"
            ),
            CALLS,
            (1.0, 1.0),
        ),
        ("def square(x): return 4", CALLS, (0.0, 0.5)),
        (
            "def add(a, b): return (a, b)",
            {"inputs": ["1\n[2]"], "outputs": [[[1, [2]]]], "fn_name": "add"},
            (1.0, 1.0),
        ),
    ],
)
def test_program_is_rewarded_only_if_all_its_tests_pass(
    program: str, label: Any, expected: tuple[float, float]
) -> None:
    assert code(program, label) == expected


@pytest.mark.parametrize(
    ("program", "label"),
    [
        (
            "def f(x): return x * x\ndef square(x): return f(x)",
            {"tests": "def check(f):\n    assert f(5) == 25", "entry": "square"},
        ),
        ("def json(x): return x * x\ndef square(x): return json(x)", CALLS),
        ("import json\njson.dumps = json.loads = None\n" + RIGHT, CALLS),
    ],
    ids=["parameter of check", "function named json", "changed json"],
)
def test_tests_do_not_overwrite_names_that_the_program_uses(program: str, label: Any) -> None:
    assert code(program, label) == (1.0, 1.0)


@pytest.mark.parametrize("label", [ASSERTS, CALLS], ids=["asserts", "calls"])
@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "print('passed')\nexit()",
        "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
        (
            "import os\n"
            "for fd in range(3, 100):\n"
            "    try: os.write(fd, b'passed')\n"
            "    except OSError: pass\n"
            "os._exit(0)"
        ),
        (
            "import os, signal\n"
            "try: os.kill(os.getppid(), signal.SIGKILL)\n"
            "except OSError: pass\n"
            "os._exit(0)"
        ),
        "1 / 0",
        "def square(x:",
        "",
    ],
)
def test_program_that_exits_before_its_tests_run_fails(trick: str, label: Any) -> None:
    assert code(trick, label) == (0.0, 0.0)
    assert code(f"{trick}\n{RIGHT}", label)[0] == (1.0 if not trick else 0.0)


def test_tests_after_a_timeout_are_skipped() -> None:
    sleeper = "import time\nif input() == '2': time.sleep(1000)\nprint(9)"
    label = json.dumps({"inputs": ["3", "2", "3"], "outputs": ["9", "4", "9"]})
    graded = grade_code(sleeper, label, timeout=5)
    assert graded == {"rewards": 0.0, "extra_logs": {"tests_passed": pytest.approx(1 / 3)}}


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("not json", 'with "tests", or with "inputs" and "outputs", not \'not json\''),
        ("[1]", r'with "tests", or with "inputs" and "outputs", not \'\[1\]\''),
        ("{}", 'with "tests", or with "inputs" and "outputs", not \'{}\''),
        ('{"inputs": ["1"], "outputs": []}', "has 1 inputs and 0 outputs"),
    ],
)
def test_code_label_without_tests_raises_an_error(label: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grade_code("print(1)", label, 60)


# ---- verifiers as rewards, in user processes


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with closing(ProcessPool(1, memory_gib=2)) as pool:
        yield pool


def score(
    pool: ProcessPool, name: str, response: str, label: Any, timeout: float = 60
) -> RewardResult:
    reward = VerifierReward(RuleConfig(verifier=name, timeout=timeout), pool)
    asyncio.run(reward.check())
    request = RewardRequest(
        query="Q: " + response + "<eos>", prompt="Q: ", label=label, answer=response
    )
    return asyncio.run(reward.score([request]))[0]


def test_verifiers_get_the_response_without_special_tokens(
    pool: ProcessPool,
) -> None:
    assert score(pool, "format", "ok", "ok") == RewardResult(reward=1.0, score=1.0)
    assert score(pool, "length", "one two three", 2) == RewardResult(reward=0.5, score=0.5)
    graded = score(
        pool, "code", "```python\nprint(int(input()) * 2)\n```", SQUARES
    )  # the label may be a JSON object
    assert graded == RewardResult(reward=0.0, score=0.0, extra_logs={"tests_passed": 0.5})


def test_endless_regular_expression_times_out(pool: ProcessPool) -> None:
    result = score(pool, "format", "a" * 40 + "!", "(a|a)*b", timeout=0.5)
    assert (result.reward, result.failure) == (None, Failure.TIMEOUT)


def test_sample_with_unparsable_label_fails(pool: ProcessPool) -> None:
    result = score(pool, "length", "one", "long")
    assert (result.reward, result.failure) == (None, Failure.EXCEPTION)
    assert "as label, such as 200" in str(result.error)
