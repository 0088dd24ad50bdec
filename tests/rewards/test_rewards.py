"""Rewards from user functions: signatures, return values and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RewardConfig, RuleConfig
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory
from openrlhf.isolation.pool import ProcessPool
from openrlhf.reporting import warn_once
from openrlhf.rewards.budget import ErrorBudget, RewardErrors
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.protocol import RewardRequest, RewardResult, read_rewards, request_of
from openrlhf.rewards.rule import VerifierReward
from tests.tiny import character_tokenizer

FILES = Path(__file__).parent / "reward_files"


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with closing(ProcessPool(2, memory_gib=2)) as pool:
        yield pool


def function(
    pool: ProcessPool, file: str, name: str = "reward_func", **kwargs: Any
) -> FunctionReward:
    rule = RuleConfig(remote_url=str(FILES / file), **{"timeout": 30.0, **kwargs})
    return FunctionReward(rule, pool, function=name)


def request(response: str, label: Any = "", prompt: str = "2+2=") -> RewardRequest:
    return RewardRequest(
        query=prompt + response, prompt=prompt, label=label, response=response, answer=response
    )


def score(reward: FunctionReward | VerifierReward, *requests: RewardRequest) -> list[RewardResult]:
    return asyncio.run(reward.score(requests))


def rewards_of(results: list[RewardResult]) -> list[float | None]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.reward for result in results]


def test_function_is_called_once_per_sample(pool: ProcessPool):
    results = score(
        function(pool, "exact.py"), request("4", "4"), request("5", "4"), request(" 4 ", "4")
    )
    assert results == [
        RewardResult(reward=1.0, score=0.5, extra_logs={"calls": 1.0}),
        RewardResult(reward=0.0, score=0.0, extra_logs={"calls": 1.0}),
        RewardResult(reward=1.0, score=0.5, extra_logs={"calls": 1.0}),
    ]


def test_batch_function_gets_all_samples_at_once(pool: ProcessPool):
    results = score(function(pool, "exact.py", batch=True), request("5", "4"), request("4", "4"))
    assert results == [
        RewardResult(reward=0.0, score=0.0, extra_logs={"calls": 2.0}),
        RewardResult(reward=1.0, score=0.5, extra_logs={"calls": 2.0}),
    ]


def test_empty_batch_makes_no_reward_call(pool: ProcessPool):
    assert score(function(pool, "exact.py", batch=True)) == score(function(pool, "exact.py")) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("other_names", 1.0),
        ("keywords_only", 1.0),
        ("asynchronous", 1.0),
        ("bfloat16", 0.5),
        ("without_labels", 5.0),
    ],
)
def test_alternative_signatures_and_returned_tensors_are_accepted(
    pool: ProcessPool, name: str, expected: float
):
    assert rewards_of(score(function(pool, "legacy.py", name), request("4", "4"))) == [expected]


def test_function_without_labels_gets_one_notice_and_may_return_bare_rewards(
    pool: ProcessPool, capsys: pytest.CaptureFixture[str]
):
    warn_once.cache_clear()
    for _ in range(2):
        reward = function(pool, "legacy.py", "without_labels")
        assert rewards_of(score(reward, request("4"), request("four"))) == [5.0, 8.0]
    [message] = capsys.readouterr().err.splitlines()
    assert "without_labels has no parameter for labels" in message


@pytest.mark.parametrize("name", ["of_another_trainer", "of_a_response", "of_an_answer"])
def test_function_with_parameter_names_of_other_frameworks_is_rejected(
    pool: ProcessPool, name: str
):
    with pytest.raises(
        ConfigError,
        match=r"but is called with \(queries, prompts, labels\).* rename its parameters",
    ):
        asyncio.run(function(pool, "legacy.py", name).check())


def test_function_with_unknown_parameter_names_gets_a_notice(
    pool: ProcessPool, capsys: pytest.CaptureFixture[str]
):
    warn_once.cache_clear()
    asyncio.run(function(pool, "legacy.py", "other_names").check())
    assert (
        "takes (texts, starts, answers) but is called with (queries, prompts, labels)"
        in capsys.readouterr().err
    )


def test_function_with_expected_parameters_gets_no_notice(
    pool: ProcessPool, capsys: pytest.CaptureFixture[str]
):
    score(function(pool, "exact.py"), request("4", "4"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("label", "reward", "score_expected"),
    [("zero score", 2.0, 0.0), ("true", 1.0, 1.0), ("bare", 0.25, 0.25)],
)
def test_scores_default_to_rewards_and_zero_scores_are_kept(
    pool: ProcessPool, label: str, reward: float, score_expected: float
):
    [result] = score(function(pool, "returns.py", "returns"), request("", label))
    assert (result.reward, result.score, result.error) == (reward, score_expected, None)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("raises", "ZeroDivisionError: nobody divides by that"),
        ("nothing", "returned rewards that are not numbers: None"),
        ("nan", r"returned rewards that are not finite: [nan]"),
        ("infinite", r"returned rewards that are not finite: [inf]"),
        ("two", "returned 2 rewards for 1 samples: [1.0, 2.0]"),
        ("text", "returned rewards that are not numbers: 'good'"),
        ("no rewards", "returned a dict without 'rewards'; its keys are ['reward']"),
        ("bad scores", "returned scores that are not finite: [nan]"),
        ("bad logs", "returned extra_logs['note'] that are not numbers: 'fine'"),
        ("logs as a list", "returned extra_logs that are not a dict: [1.0]"),
        ("opaque", "returned type Opaque"),
    ],
)
def test_error_for_invalid_return_value_quotes_it(pool: ProcessPool, label: str, text: str):
    bad, good = score(
        function(pool, "returns.py", "returns"), request("", label), request("", "bare")
    )
    assert bad.error is not None and text in bad.error and "returns.py:returns" in bad.error
    assert bad.reward is None and bad.score is None
    assert good.reward == 0.25


def test_invalid_return_value_fails_the_whole_batch(pool: ProcessPool):
    results = score(
        function(pool, "returns.py", "returns", batch=True), request("", "two"), request("", "bare")
    )
    assert rewards_of(results) == [1.0, 2.0]
    results = score(
        function(pool, "returns.py", "returns", batch=True), request("", "bare"), request("", "two")
    )
    assert all(
        result.error and "returned 1 rewards for 2 samples" in result.error for result in results
    )


def test_function_that_hangs_or_exits_fails_only_its_sample(tmp_path: Path, pool: ProcessPool):
    file = tmp_path / "moody.py"
    file.write_text(
        "import os, time\n"
        "def reward_func(queries, prompts, labels):\n"
        "    if labels[0] == 'hang': time.sleep(100)\n"
        "    if labels[0] == 'exit': os._exit(3)\n"
        "    return {'rewards': [1.0]}\n"
    )
    reward = FunctionReward(RuleConfig(remote_url=str(file), timeout=3.0), pool)
    results = score(reward, *(request("", label) for label in ("hang", "", "exit", "", "")))
    assert [result.reward for result in results] == [None, 1.0, None, 1.0, 1.0]
    assert "took more than 3 s" in str(results[0].error) and "exited with status 3" in str(
        results[2].error
    )


def test_file_that_cannot_be_loaded_raises_config_error(tmp_path: Path, pool: ProcessPool):
    file = tmp_path / "broken.py"
    file.write_text("def reward_func(queries, prompts, labels)\n    return 1\n")
    reward = FunctionReward(RuleConfig(remote_url=str(file), timeout=1), pool)
    with pytest.raises(
        ConfigError, match=r"--reward.remote_url: .*broken.py:reward_func(\n|.)*SyntaxError"
    ):
        asyncio.run(reward.check())
    assert "SyntaxError" in str(score(reward, request(""))[0].error)


def test_rewards_may_be_nested_lists():
    results = read_rewards(
        {"rewards": [[1], [0.5]], "scores": None, "extra_logs": {"a": [3, 4]}}, 2
    )
    assert [(result.reward, result.score) for result in results] == [(1.0, 1.0), (0.5, 0.5)]
    assert [result.extra_logs for result in results] == [{"a": 3.0}, {"a": 4.0}]
    with pytest.raises(ValueError, match="returned 1 extra_logs\\['a'\\] for 2 samples"):
        read_rewards({"rewards": [1, 2], "extra_logs": {"a": 3}}, 2)


def test_error_truncates_a_long_return_value():
    with pytest.raises(ValueError) as caught:
        read_rewards(list(range(10_000)), 1)
    assert "10000 rewards for 1 samples" in str(caught.value) and len(str(caught.value)) < 300


def test_all_mistakes_in_a_return_value_are_reported_together() -> None:
    returned = {"reward": [1], "scores": ["good"], "extra_logs": {"a": "x", "b": [1, 2], "c": 3}}
    with pytest.raises(ValueError) as caught:
        read_rewards(returned, 1)
    said = str(caught.value)
    for part in ("without 'rewards'", "scores", "extra_logs['a']", "2 extra_logs['b']"):
        assert part in said
    assert "extra_logs['c']" not in said
    with pytest.raises(ValueError, match=r"not finite.*extra_logs that are not a dict"):
        read_rewards({"rewards": [float("nan")], "extra_logs": [1]}, 1)


def test_math_verifier_grades_the_response_and_ignores_the_prompt(pool: ProcessPool):
    reward = VerifierReward(RuleConfig(verifier="math", timeout=30), pool)
    asyncio.run(reward.check())
    results = score(
        reward,
        request(r"thus \boxed{\frac{1}{2}}<|im_end|>", "0.5"),
        request("A: 1,000", "So it is 1000.\n#### 1,000"),
        request("I cannot say", "7", prompt=r"An example: \boxed{7}. Now you: "),
        request("A: 7", 7),
    )
    assert rewards_of(results) == [1.0, 1.0, 0.0, 1.0]


def test_only_the_texts_that_a_reward_reads_are_decoded(pool: ProcessPool, tmp_path: Path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts, labels):\n    return float(queries == ['1+1=2<eos>'])\n"
    )
    tokenizer = character_tokenizer()
    asked, sampled = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("1+1=", "2<eos>")
    )
    for reward, query, answer in (
        (FunctionReward(RuleConfig(remote_url=str(file), timeout=30), pool), "1+1=2<eos>", ""),
        (VerifierReward(RuleConfig(verifier="math", timeout=30), pool), "", "2"),
    ):
        seen = request_of(tokenizer, "1+1=", "2", asked, sampled, extra_fields=reward.extra_fields)
        assert (seen.query, seen.response, seen.answer) == (query, "2<eos>", answer)
        assert rewards_of(score(reward, seen)) == [1.0]
    assert request_of(tokenizer, "1+1=", "2", asked, []).response == ""


def test_on_error_flag_sets_error_budget_and_fallback_reward() -> None:
    flags = {
        text: RewardConfig(on_error=text, max_error_rate=0.25) for text in ("fail", "drop", "-1")
    }
    rates = {text: ErrorBudget(reward).max_error_rate for text, reward in flags.items()}
    assert rates == {"fail": 0.25, "-1": 0.25, "drop": 1.0}
    assert [reward.fallback for reward in flags.values()] == [None, None, -1.0]


def episodes(failed: int, total: int) -> list[Trajectory]:
    prompt = Prompt(index=0, text="", tokens=[1])
    return [
        Trajectory(
            tokens=[1, 2],
            action_mask=[False, True],
            rollout_logprobs=[0.0, -1.0],
            prompt=prompt,
            sample_index=i,
            stop_reason=StopReason.FAILED if i < failed else StopReason.STOP,
            error=f"traceback of {i}" if i < failed else None,
        )
        for i in range(total)
    ]


def test_run_stops_above_the_error_rate_and_shows_the_first_traceback():
    budget = ErrorBudget(RewardConfig(max_error_rate=0.1))
    budget.check(episodes(2, 20))
    budget.check([])
    with pytest.raises(
        RewardErrors, match=r"3 of 20 episodes failed.*max_error_rate 0.1(.|\n)*traceback of 0"
    ):
        budget.check(episodes(3, 20))
    with pytest.raises(RewardErrors):
        ErrorBudget(RewardConfig(max_error_rate=0)).check(episodes(1, 1000))


def test_dropped_episodes_do_not_stop_the_run():
    ErrorBudget(RewardConfig(max_error_rate=1.0)).check(episodes(5, 5))
