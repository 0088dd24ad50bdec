"""A judge model on a server: requests, verdicts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from openrlhf.config.evaluation import JudgeConfig
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.rewards import servers as http_servers
from openrlhf.rewards.judge import Judge, NoVerdict, read_verdict
from openrlhf.rewards.servers import ServerError
from openrlhf.training.devices import free_port
from tests.judge_server import JudgeServer, answers_in, judge_server


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_servers, "LONGEST_PAUSE_S", 0.1)


def compare(server: JudgeServer, model: str, first: str, second: str) -> float:
    judge = Judge(
        JudgeConfig(url=server.url, model=model, max_tokens=7), RuleConfig(timeout=20, retries=2)
    )
    return asyncio.run(judge.compare("say e", first, second))


def test_better_answer_wins_in_both_positions(server: JudgeServer) -> None:
    assert compare(server, "letters", "eee", "x") == 1.0
    assert compare(server, "letters", "x", "eee") == 0.0


def test_judge_with_position_bias_results_in_a_tie(server: JudgeServer) -> None:
    assert compare(server, "first", "eee", "x") == 0.5
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(map(answers_in, asked)) == [("eee", "x"), ("x", "eee")]
    assert all("<message>\nsay e\n</message>" in text for text in asked)


def test_request_is_a_chat_completion_with_the_api_key(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    compare(server, "letters", "e", "x")
    assert {k: v for k, v in server.bodies[0].items() if k != "messages"} == {
        "model": "letters",
        "temperature": 0,
        "max_tokens": 7,
    }
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["user"]
    assert server.keys == {"Bearer secret"}


def test_placeholders_in_answers_are_not_substituted(
    server: JudgeServer,
) -> None:
    compare(server, "letters", "{b}{message}", r"\1 {a}")
    assert sorted(answers_in(body["messages"][0]["content"])[0] for body in server.bodies) == [
        r"\1 {a}",
        "{b}{message}",
    ]


def test_verdict_may_follow_an_explanation(server: JudgeServer) -> None:
    assert compare(server, "chatty", "eee", "x") == 1.0


@pytest.mark.parametrize(
    ("text", "letter"), [("A", "A"), (" b.\n", "B"), ("[[B]]", "B"), ("A wins?\nVerdict: A", "A")]
)
def test_single_letter_on_the_last_line_is_the_verdict(text: str, letter: str) -> None:
    assert read_verdict(text) == letter


@pytest.mark.parametrize("text", ["", "A or B", "A\nbecause it is short", "C", "neither"])
def test_any_other_last_line_is_not_a_verdict(text: str) -> None:
    with pytest.raises(NoVerdict, match="neither A nor B"):
        read_verdict(text)


def test_busy_judge_is_retried(server: JudgeServer) -> None:
    assert compare(server, "busy_once", "eee", "x") == 1.0
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("model", "failure", "error"),
    [
        (
            "broken",
            Failure.SERVER,
            r"judge http.*/v1: status 500: .*out of memory.*\(attempts: 3\)",
        ),
        ("unknown", Failure.SERVER, "judge http.* responded with status 404: .*no such model"),
        ("silent", Failure.SERVER, r"judge http.* returned no str at choices\.0\.message\.content"),
        ("undecided", Failure.RESULT, "neither A nor B: .*Both A and B are fine"),
    ],
)
def test_error_for_missing_verdict_gives_the_reason(
    server: JudgeServer, model: str, failure: Failure, error: str
) -> None:
    with pytest.raises((ServerError, NoVerdict), match=error) as caught:
        compare(server, model, "eee", "x")
    assert caught.value.failure is failure


def test_unreachable_judge_is_reported_before_sampling(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_servers, "START_S", 1)
    asyncio.run(
        Judge(JudgeConfig(url=server.url, model="letters"), RuleConfig()).engine.servers.check()
    )
    gone = Judge(JudgeConfig(url=f"http://127.0.0.1:{free_port()}/v1", model="m"), RuleConfig())
    with pytest.raises(ConfigError, match=r"--judge\.url: .* does not respond.*Start the judge"):
        asyncio.run(gone.engine.servers.check())
