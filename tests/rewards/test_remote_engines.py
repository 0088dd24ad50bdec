"""Remote engines, which user code selects by name: requests, callers and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
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
    """Start an engine named `helper`. Each request gets two attempts."""
    with openai_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        patch.setattr(http_servers, "LONGEST_PAUSE_S", 0.1)
        offer_engines(
            RemoteEnginesConfig(remote_engines=(f"helper={server.url}/",)),
            RuleConfig(timeout=60, retries=1),
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
    with closing(ProcessPool(1, memory_gib=1)) as pool:
        yield pool


def chat(model: str | None = None, timeout: float | None = None, **parameters: Any) -> str:
    engine = remote_engine("helper", model, timeout=timeout)
    return asyncio.run(engine.chat(HELLO, **parameters))


def score(pool: ProcessPool, function: str, model: str) -> RewardResult:
    reward = FunctionReward(
        RuleConfig(remote_url=str(FUNCTIONS), timeout=60), pool, function=function
    )
    request = RewardRequest(query="say e:ee", prompt="say e:", label=model)
    return asyncio.run(reward.score([request]))[0]


def test_chat_sends_messages_and_parameters_and_returns_the_reply(
    server: OpenAIServer,
) -> None:
    assert chat("loud", temperature=0, max_tokens=3) == "HELLO"
    body = {"model": "loud", "messages": HELLO, "temperature": 0, "max_tokens": 3}
    assert server.asked == [("/v1/chat/completions", body)]


def test_completion_accepts_text_or_tokens(server: OpenAIServer) -> None:
    engine = remote_engine("helper", "loud")
    assert asyncio.run(engine.completion("four")) == "4"
    assert asyncio.run(engine.completion([7, 8, 9], stop=["."])) == "3"
    assert server.asked[1] == (
        "/v1/completions",
        {"model": "loud", "prompt": [7, 8, 9], "stop": ["."]},
    )


def test_default_model_is_the_first_listed_and_looked_up_only_once(
    server: OpenAIServer,
) -> None:
    engine = remote_engine("helper")
    assert [engine.chat_sync(HELLO), engine.completion_sync("four")] == ["HELLO", "4"]
    assert (
        remote_engine("helper").chat_sync(HELLO) == "HELLO"
    )  # like a reward function that looks up the engine in every call
    chats = ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions"]
    assert [path for path, _ in server.asked] == ["/v1/models", *chats]
    assert all(body is None or body["model"] == "loud" for _, body in server.asked)


def test_engine_works_across_event_loops_and_threads(
    server: OpenAIServer,
) -> None:
    engine = remote_engine("helper", "loud")

    async def several() -> list[str]:
        return await asyncio.gather(
            *(engine.chat(HELLO) for _ in range(8)), asyncio.to_thread(engine.chat_sync, HELLO)
        )

    assert [asyncio.run(several()) for _ in range(2)] == [["HELLO"] * 9] * 2
    assert engine.chat_sync(HELLO) == "HELLO"


def test_api_key_is_passed_as_an_argument_or_read_from_the_environment(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "common")
    chat("loud")
    remote_engine("helper", "loud", key="own").chat_sync(HELLO)
    assert server.keys == {"Bearer common", "Bearer own"}


def test_busy_server_is_retried(server: OpenAIServer) -> None:
    assert chat("busy_once") == "HELLO"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("model", "asked", "error"),
    [
        (
            "broken",
            2,
            r"remote engine http.*/v1: status 500: .*out of memory.* \(attempts: 2\)",
        ),
        ("unknown", 1, "/v1/chat/completions responded with status 404: .*no such model"),
        ("no_json", 1, "did not return JSON: '<html>'"),
        ("wrong_json", 1, r"returned no str at choices\.0\.message\.content: \"{'choices': \[\]}"),
        ("silent", 1, "returned no str at choices"),
    ],
)
def test_failed_request_raises_server_error(
    server: OpenAIServer, model: str, asked: int, error: str
) -> None:
    with pytest.raises(ServerError, match=error) as caught:
        chat(model)
    assert caught.value.failure is Failure.SERVER
    assert len(server.asked) == asked


def test_timeout_bounds_each_attempt(server: OpenAIServer) -> None:
    with pytest.raises(ServerError, match=r"no response within 0\.5 s .*\(attempts: 2\)") as caught:
        chat("slow", timeout=0.5)
    assert caught.value.failure is Failure.SERVER


def test_server_that_lists_no_models_raises_server_error(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "models", [])
    with pytest.raises(ServerError, match=r"no str at data\.0\.id"):
        chat()


def test_error_for_unknown_engine_lists_available_engines(server: OpenAIServer) -> None:
    with pytest.raises(
        LookupError,
        match=r"--rollout\.remote_engines has no engine 'judge'; available engines: helper",
    ):
        remote_engine("judge")


def test_unreachable_engine_is_reported_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_servers, "START_S", 1)
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(
        ConfigError,
        match=r"--rollout\.remote_engines: http.* does not respond.*Start the remote engine",
    ):
        offer_engines(
            RemoteEnginesConfig(remote_engines=(f"judge=http://127.0.0.1:{free_port()}/v1",)),
            RuleConfig(timeout=1, retries=0),
        )


@pytest.mark.parametrize("function", ["plain", "waits"])
def test_reward_function_can_call_an_engine(
    server: OpenAIServer, pool: ProcessPool, function: str
) -> None:
    assert score(pool, function, "loud").reward == 1.0


@pytest.mark.parametrize(
    ("function", "model"), [("plain", "broken"), ("plain", "wrong_json"), ("waits", "slow")]
)
def test_uncaught_server_error_counts_as_server_failure(
    server: OpenAIServer, pool: ProcessPool, function: str, model: str
) -> None:
    result = score(pool, function, model)
    assert (result.reward, result.failure) == (None, Failure.SERVER)
    assert "remote engine http" in (result.error or "")


def test_reward_function_can_catch_server_error(server: OpenAIServer, pool: ProcessPool) -> None:
    assert score(pool, "catches", "broken").reward == -1.0


def test_unknown_engine_name_counts_as_exception(server: OpenAIServer, pool: ProcessPool) -> None:
    assert score(pool, "unknown", "loud").failure is Failure.EXCEPTION
