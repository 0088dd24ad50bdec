"""Rewards from HTTP servers: requests, failures, retries and secrets."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import httpx
import pytest

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.rewards import servers as http_servers
from openrlhf.rewards.preview import check_reward
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from openrlhf.rewards.rule import HTTPReward
from openrlhf.training.devices import free_port
from tests.reward_server import RewardServer, reward_server
from tests.tiny import character_tokenizer


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_servers, "LONGEST_PAUSE_S", 0.1)


def request(response: str, label: object = "") -> RewardRequest:
    return RewardRequest(query=f"say e:{response}", prompt="say e:", label=label)


def score(
    urls: list[str],
    *requests: RewardRequest,
    timeout: float = 60,
    retries: int = 2,
    batch: bool = False,
) -> list[RewardResult]:
    return asyncio.run(
        served_by(urls, timeout=timeout, retries=retries, batch=batch).score(requests)
    )


def served_by(urls: list[str], **flags: Any) -> HTTPReward:
    return HTTPReward(RuleConfig(remote_url=",".join(urls), **flags))


def test_request_contains_one_sample_in_lists_of_length_one(server: RewardServer):
    results = score([server.url + "/get_reward"], request("ee", "yes"), request("", {"a": 1}))
    assert [result.reward for result in results] == [2.0, 0.0]
    assert [result.score for result in results] == [2.0, 0.0]
    assert [dict(result.extra_logs) for result in results] == [{"letters": 8.0}, {"letters": 6.0}]
    assert sorted(server.bodies, key=str) == [
        {"query": ["say e:"], "prompts": ["say e:"], "labels": [{"a": 1}]},
        {"query": ["say e:ee"], "prompts": ["say e:"], "labels": ["yes"]},
    ]


def test_batch_request_contains_all_samples(server: RewardServer):
    results = score([server.url + "/scores"], request("ee"), request("e"), batch=True)
    assert [(result.reward, result.score) for result in results] == [(2.0, 0.25), (1.0, 0.25)]
    assert [len(body["query"]) for body in server.bodies] == [2]


def test_many_samples_share_a_limited_number_of_connections(server: RewardServer):
    results = score([server.url], *[request("e" * (i % 7)) for i in range(600)])
    assert [result.reward for result in results] == [i % 7 for i in range(600)]


def test_busy_server_is_retried(server: RewardServer):
    assert score([server.url + "/busy_twice"], request("e"))[0].reward == 1.0
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("path", "asked", "error"),
    [
        ("broken", 3, r"server http.*/broken: status 500: .*out of memory.* \(attempts: 3\)"),
        ("close", 3, r"ReadError|RemoteProtocolError"),
        ("wrong_query", 1, "responded with status 422: .*field missing"),
        ("no_json", 1, "did not return JSON: '<html>'"),
        ("too_many", 1, "returned 3 rewards for 1 samples"),
        ("huge", 1, "int too large"),
        ("not_finite", 1, "returned rewards that are not finite"),
    ],
)
def test_error_of_failed_request_names_server_and_reason(
    server: RewardServer, path: str, asked: int, error: str
):
    (result,) = score([f"{server.url}/{path}"], request("e"))
    assert result.reward is None
    assert result.error is not None
    assert re.search(error, result.error), result.error
    assert len(server.bodies) == asked


def test_timeout_bounds_each_attempt(server: RewardServer):
    (result,) = score([f"{server.url}/hang"], request("e"), timeout=0.2)
    assert result.reward is None
    assert "no response within 0.2 s (--reward.timeout) (attempts: 3)" in str(result.error)


def test_label_that_cannot_be_encoded_as_json_fails_only_its_sample(server: RewardServer):
    good, bad = score([server.url], request("e"), request("e", label=object()))
    assert (good.reward, bad.reward) == (1.0, None)
    assert "not JSON serializable" in str(bad.error)


def test_load_is_balanced_across_working_servers(
    server: RewardServer, capsys: pytest.CaptureFixture[str]
):
    dead = f"http://127.0.0.1:{free_port()}"
    with reward_server() as second:
        urls = [dead, server.url, second.url + "/broken", second.url]
        results = score(urls, *[request("e")] * 200)
    assert {result.reward for result in results} == {1.0}
    assert min(len(server.bodies), len(second.bodies)) > 40
    printed = capsys.readouterr().err.splitlines()
    warned = [line for line in printed if line.startswith("[warning] reward server")]
    assert len(warned) == len(set(warned)) <= 4


def test_idle_servers_are_used_in_rotation(server: RewardServer):
    servers = served_by([f"{server.url}/?number={number}" for number in range(3)])

    async def one_by_one() -> None:
        for _ in range(7):
            await servers.score([request("e")])

    asyncio.run(one_by_one())
    assert [path[-1] for path in server.paths] == list("0120120")


def test_unreachable_server_is_reported_before_the_run(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_servers, "START_S", 2)
    dead = f"http://127.0.0.1:{free_port()}/get_reward"
    asyncio.run(served_by([server.url], timeout=1, retries=0).check())
    with pytest.raises(ConfigError, match=f"{dead} does not respond.*Start the reward server"):
        asyncio.run(served_by([server.url, dead], timeout=1, retries=0).check())


def test_wait_for_a_server_that_drops_packets_is_bounded(monkeypatch: pytest.MonkeyPatch):
    async def drop(self: Any, asked: httpx.Request) -> httpx.Response:
        await asyncio.sleep(asked.extensions["timeout"]["connect"])
        raise httpx.ConnectTimeout("no response")

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", drop)
    monkeypatch.setattr(http_servers, "START_S", 2)
    begin = monotonic()
    with pytest.raises(ConfigError, match="http://dropped does not respond"):
        asyncio.run(served_by(["http://dropped"]).check())
    assert 2 <= monotonic() - begin < http_servers.PROBE_S


def test_server_with_the_shortest_remaining_backoff_is_used(server: RewardServer):
    with reward_server() as resting:
        reward = served_by([server.url + "/busy_twice", resting.url])
        reward.servers[1].rests_until = monotonic() + 1000
        (result,) = asyncio.run(reward.score([request("e")]))
    assert result.reward == 1.0
    assert len(server.bodies) == 3
    assert not resting.bodies


def test_untried_server_is_used_before_one_that_failed(server: RewardServer):
    with reward_server() as broken:
        reward = served_by([broken.url + "/broken", server.url], retries=1)
        (result,) = asyncio.run(reward.score([request("e")]))
    assert result.reward == 1.0
    assert len(broken.bodies) == 1


def test_each_unreachable_server_is_a_separate_violation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_servers, "START_S", 1)
    urls = [f"http://127.0.0.1:{free_port()}/{path}" for path in ("a", "b")]
    with pytest.raises(ConfigError) as raised:
        asyncio.run(served_by(urls).check())
    assert len(raised.value.violations) == 2


def test_startup_check_closes_its_connections(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
):
    clients: list[httpx.AsyncClient] = []

    class Client(httpx.AsyncClient):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            clients.append(self)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    rows = [Prompt(index=n, text=f"{n}=", tokens=[], label="e" * n) for n in (1, 2)]
    check_reward(RuleConfig(remote_url=server.url), rows, character_tokenizer())
    assert server.bodies
    assert all(client.is_closed for client in clients)


def test_backoff_stays_bounded_after_thousands_of_failures(server: RewardServer):
    reward = served_by([f"http://127.0.0.1:{free_port()}"], timeout=1, retries=0)
    reward.servers[0].pause = 5000
    (result,) = asyncio.run(reward.score([request("e")]))
    assert "attempts: 1" in str(result.error)
    assert reward.servers[0].rest <= http_servers.LONGEST_PAUSE_S


def test_concurrent_requests_do_not_wait_for_connections(server: RewardServer):
    """The server responds only after the maximum number of concurrent requests has arrived."""
    server.together = threading.Barrier(http_servers.IN_FLIGHT)
    results = score([server.url + "/together"], *[request("e")] * http_servers.IN_FLIGHT, retries=0)
    assert {result.error for result in results} == {None}


def test_credentials_in_url_are_sent_but_never_logged(
    server: RewardServer, capsys: pytest.CaptureFixture[str]
):
    secret = server.url.replace("http://", "http://me:hunter2@")
    query = "?api_key=hunter2&model=m"
    good, bad, absent = (
        secret + "/get_reward" + query,
        secret + "/broken" + query,
        f"http://me:hunter2@127.0.0.1:{free_port()}",
    )
    [result] = score([good], request("ee"))
    errors = [score([url], request("e"), retries=1)[0].error or "" for url in (bad, absent)]
    assert result.reward == 2.0
    assert (
        server.authorizations == ["Basic bWU6aHVudGVyMg=="] * len(server.authorizations)
        and server.authorizations
    )
    assert f"/get_reward{query}" in server.paths
    assert "***@" in errors[0] and "api_key=***" in errors[0] and "***@" in errors[1]
    assert "hunter2" not in "".join(errors) + capsys.readouterr().err
