"""Servers that user code asks by name: what they are asked, where that works, and what their
failures become.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.isolation.pool import ProcessPool
from openrlhf.rewards import remote_engines as engines
from openrlhf.rewards import servers as http_servers
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from openrlhf.rewards.remote_engines import VARIABLE, offer_engines, remote_engine
from openrlhf.rewards.servers import ServerError
from openrlhf.training.devices import free_port
from tests.openai_server import OpenAIServer, openai_server

FUNCTIONS = Path(__file__).parents[1] / "rewards/reward_files/asks.py"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[OpenAIServer]:
    """Offered as `helper`, with two seconds for an attempt and one more of these."""
    with openai_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        patch.setattr(http_servers, "LONGEST_PAUSE_S", 0.1)
        offer_engines(
            RemoteEnginesConfig(remote_engines=(f"helper={server.url}/",)),
            RuleConfig(timeout=2, retries=1),
        )
        yield server


@pytest.fixture
def server(served: OpenAIServer) -> OpenAIServer:
    served.asked.clear()
    served.keys.clear()
    engines._engine.cache_clear()
    return served


@pytest.fixture(scope="module")
def pool(served: OpenAIServer) -> Iterator[ProcessPool]:
    with ProcessPool(1, memory_gib=1) as pool:
        yield pool


def chat(model: str | None = None, **parameters: Any) -> str:
    return asyncio.run(remote_engine("helper", model).chat(HELLO, **parameters))


def score(pool: ProcessPool, function: str, model: str) -> RewardResult:
    reward = FunctionReward(
        RuleConfig(remote_url=str(FUNCTIONS), timeout=60), pool, function=function
    )
    request = RewardRequest(query="say e:ee", prompt="say e:", label=model)
    return asyncio.run(reward.score([request]))[0]


def test_a_conversation_is_sent_with_its_parameters_and_the_reply_is_text(
    server: OpenAIServer,
) -> None:
    assert chat("loud", temperature=0, max_tokens=3) == "HELLO"
    body = {"model": "loud", "messages": HELLO, "temperature": 0, "max_tokens": 3}
    assert server.asked == [("/v1/chat/completions", body)]


def test_a_prompt_is_text_or_tokens(server: OpenAIServer) -> None:
    engine = remote_engine("helper", "loud")
    assert asyncio.run(engine.completion("four")) == "4"
    assert asyncio.run(engine.completion([7, 8, 9], stop=["."])) == "3"
    assert server.asked[1] == (
        "/v1/completions",
        {"model": "loud", "prompt": [7, 8, 9], "stop": ["."]},
    )


def test_without_a_name_the_model_is_the_first_that_the_server_lists_asked_for_once(
    server: OpenAIServer,
) -> None:
    engine = remote_engine("helper")
    assert [engine.chat_sync(HELLO), engine.completion_sync("four")] == ["HELLO", "4"]
    assert (
        remote_engine("helper").chat_sync(HELLO) == "HELLO"
    )  # as a function does that asks in every call
    chats = ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions"]
    assert [path for path, _ in server.asked] == ["/v1/models", *chats]
    assert all(body is None or body["model"] == "loud" for _, body in server.asked)


def test_one_engine_serves_loops_that_come_and_go_and_code_without_one(
    server: OpenAIServer,
) -> None:
    engine = remote_engine("helper", "loud")

    async def several() -> list[str]:
        return await asyncio.gather(
            *(engine.chat(HELLO) for _ in range(8)), asyncio.to_thread(engine.chat_sync, HELLO)
        )

    assert [asyncio.run(several()) for _ in range(2)] == [["HELLO"] * 9] * 2
    assert engine.chat_sync(HELLO) == "HELLO"


def test_the_key_is_the_one_given_or_that_of_the_environment(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "common")
    chat("loud")
    remote_engine("helper", "loud", key="own").chat_sync(HELLO)
    assert server.keys == {"Bearer common", "Bearer own"}


def test_a_busy_server_is_asked_again(server: OpenAIServer) -> None:
    assert chat("busy_once") == "HELLO"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("model", "asked", "error"),
    [
        ("broken", 2, r"remote engine http.*/v1: status 500: .*out of memory.* \(attempt 2 of 2\)"),
        ("slow", 2, r"no answer within 2 s"),
        ("unknown", 1, "/v1/chat/completions answered status 404: .*no such model"),
        ("no_json", 1, "sent no JSON: '<html>'"),
        ("wrong_json", 1, r"sent no str at choices\.0\.message\.content: \"{'choices': \[\]}"),
        ("silent", 1, "sent no str at choices"),
    ],
)
def test_a_failure_is_one_kind_of_exception(
    server: OpenAIServer, model: str, asked: int, error: str
) -> None:
    with pytest.raises(ServerError, match=error) as caught:
        chat(model)
    assert caught.value.failure is Failure.SERVER
    assert len(server.asked) == asked


def test_a_server_that_lists_no_model_is_told_of(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "models", [])
    with pytest.raises(ServerError, match=r"no str at data\.0\.id"):
        chat()


def test_an_unknown_name_is_answered_with_those_there_are(server: OpenAIServer) -> None:
    with pytest.raises(
        LookupError, match=r"--rollout\.remote_engines has no engine 'judge'; its engines: helper"
    ):
        remote_engine("judge")


def test_an_engine_that_is_not_there_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_servers, "START_S", 1)
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(
        ConfigError,
        match=r"--rollout\.remote_engines: http.* does not answer.*Start the remote engine",
    ):
        offer_engines(
            RemoteEnginesConfig(remote_engines=(f"judge=http://127.0.0.1:{free_port()}/v1",)),
            RuleConfig(timeout=1, retries=0),
        )


@pytest.mark.parametrize("function", ["plain", "waits"])
def test_reward_functions_ask_in_their_processes(
    server: OpenAIServer, pool: ProcessPool, function: str
) -> None:
    assert score(pool, function, "loud").reward == 1.0


@pytest.mark.parametrize(
    ("function", "model"), [("plain", "broken"), ("plain", "wrong_json"), ("waits", "slow")]
)
def test_a_failure_that_a_function_lets_through_is_the_servers(
    server: OpenAIServer, pool: ProcessPool, function: str, model: str
) -> None:
    result = score(pool, function, model)
    assert (result.reward, result.failure) == (None, Failure.SERVER)
    assert "remote engine http" in (result.error or "")


def test_a_function_may_catch_it(server: OpenAIServer, pool: ProcessPool) -> None:
    assert score(pool, "catches", "broken").reward == -1.0


def test_an_unknown_name_is_the_functions_own_mistake(
    server: OpenAIServer, pool: ProcessPool
) -> None:
    assert score(pool, "unknown", "loud").failure is Failure.EXCEPTION
