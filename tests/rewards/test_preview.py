"""The trial run of a reward on the dataset's labels before training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.isolation.pool import ProcessPool
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.preview import answered, reward_preview, wrong_requests
from tests.agents.tokenizers import TOKENIZERS
from tests.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
LABELS = ["2", "4", "6"]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with closing(ProcessPool(1)) as pool:
        yield pool


def line(pool: ProcessPool, folder: Path, body: str, labels: list[str] = LABELS) -> str:
    """Return the text of the finding about a reward function, or "" if there is none."""
    file = folder / f"reward{len(list(folder.iterdir()))}.py"
    file.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    reward = FunctionReward(RuleConfig(remote_url=str(file), timeout=60), pool)
    rows = [
        Prompt(index=n, text=f"{n}+{n}=", tokens=[], label=label)
        for n, label in enumerate(labels, start=1)
    ]
    found = asyncio.run(reward_preview(reward, rows, TOKENIZER))
    return " ".join(map(str, found))


def test_correct_answer_ends_with_the_eos_token() -> None:
    request = answered(TOKENIZER, "1+1=", "2", "2")
    assert (request.query, request.response, request.answer) == ("1+1=2<eos>", "2<eos>", "2")
    assert answered(TOKENIZER, "1+1=", "2", "2<eos>") == request


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_answer_is_tokenized_as_the_continuation_of_the_prompt(kind: str) -> None:
    """A sentencepiece tokenizer would put a space before a text that stands alone."""
    tokenizer = TOKENIZERS[kind]()
    request = answered(tokenizer, "How many?\n", "2", "2")
    assert request.query.removeprefix(request.prompt) == f"2{tokenizer.eos_token}"


def test_preview_warns_about_reward_that_does_not_expect_the_eos_token(
    pool: ProcessPool, tmp_path: Path
) -> None:
    assert (
        line(pool, tmp_path, "return [float(queries[0] == prompts[0] + labels[0] + '<eos>')]") == ""
    )
    said = line(pool, tmp_path, "return [float(queries[0] == prompts[0] + labels[0])]")
    assert "'2<eos>'" in said
    assert said.count("[0.0, 0.0, 0.0]") == 2  # for correct answers and for labels of other rows


def test_preview_quotes_each_distinct_error_once(pool: ProcessPool, tmp_path: Path) -> None:
    said = line(pool, tmp_path, "raise ValueError('no such label')")
    assert said.startswith("The reward failed on 6 of 6")
    assert said.count("ValueError: no such label") == 1
    said = line(pool, tmp_path, "return {'2': 'two', '4': [1.0] * 5}.get(labels[0], 0.0)")
    assert said.startswith("The reward failed on 4 of 6")
    assert said.count("'two'") == 1 and said.count("returned 5 rewards") == 1


def test_preview_reports_nothing_if_all_labels_are_equal(pool: ProcessPool, tmp_path: Path) -> None:
    for labels in (["2", "2"], ["", ""]):
        assert line(pool, tmp_path, "return [0.0]", labels) == ""


def test_wrong_answer_is_the_next_label_that_differs() -> None:
    def wrong(*labels: str) -> list[str]:
        requests = [answered(None, "1+1=", label, label) for label in labels]
        return [request.query for request in wrong_requests(requests, None)]

    assert wrong("a", "a", "b") == ["1+1=b", "1+1=b", "1+1=a"]
    assert wrong("a", "a") == []
