"""The reward functions in examples/rewards, called as a run calls them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from openrlhf.config.rollout import RuleConfig
from openrlhf.isolation.pool import ProcessPool
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from tests.sources import ROOT

EXAMPLES = ROOT / "examples/rewards"
SQUARES = json.dumps({"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]})


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with closing(ProcessPool(1, memory_gib=2)) as pool:
        yield pool


def score(pool: ProcessPool, file: str, response: str, label: str) -> RewardResult:
    reward = FunctionReward(RuleConfig(remote_url=str(EXAMPLES / file), timeout=60), pool)
    return asyncio.run(
        reward.score([RewardRequest(query="Q: " + response, prompt="Q: ", label=label)])
    )[0]


@pytest.mark.parametrize(
    ("file", "response", "label", "expected"),
    [
        ("math_answers.py", r"So \boxed{\frac{1}{2}}.", "0.5",
         RewardResult(reward=1, score=1, extra_logs={"boxed": 1})),
        ("math_answers.py", "So 0.5.", "0.5",
         RewardResult(reward=0, score=0, extra_logs={"boxed": 0})),
        ("math_format.py", r"<think>a</think> \boxed{4}", "4",
         RewardResult(reward=1, score=1, extra_logs={"form": 1})),
        ("math_format.py", r"<think>a</think> \boxed{5}", "4",
         RewardResult(reward=0.1, score=0, extra_logs={"form": 1})),
        ("math_format.py", r"\boxed{4}", "4",
         RewardResult(reward=0, score=0, extra_logs={"form": 0})),
        ("code_share.py", "```python\nprint(int(input()) ** 2)\n```", SQUARES,
         RewardResult(reward=1, score=1)),
        ("code_share.py", "```python\nprint(4)\n```", SQUARES, RewardResult(reward=0.5, score=0)),
        ("code_share.py", "print(4)", SQUARES, RewardResult(reward=0, score=0)),
    ],
)  # fmt: skip
def test_example_reward_matches_its_docstring(
    pool: ProcessPool, file: str, response: str, label: str, expected: RewardResult
) -> None:
    assert score(pool, file, response, label) == expected


def test_every_example_reward_has_a_case() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {
        "math_answers.py",
        "math_format.py",
        "code_share.py",
    }


@pytest.mark.parametrize(
    "end",
    ["</s>", "<|im_end|>", "<|eot_id|>", "<eos>", "<end_of_turn>\n", "<｜end▁of▁sentence｜>", ""],
)
def test_first_function_on_the_rewards_page_ignores_the_eos_token(
    pool: ProcessPool, tmp_path: Path, end: str
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.DOTALL)
    file = tmp_path / "reward.py"
    file.write_text(blocks[0])
    scores = [
        score(pool, str(file), response + end, "72").score
        for response in ("72", " 72", "172", "7", "")
    ]
    assert scores == [1, 1, 0, 0, 0]
    assert score(pool, str(file), "72" + end, "72" + end).score == 1
