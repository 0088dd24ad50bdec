"""Tests for the reward server's responses. The model's score for a text is the text's length."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from openrlhf.config.flags import amend
from openrlhf.config.options import ConfigError
from openrlhf.config.serving import ServeConfig
from openrlhf.serving.batcher import Batcher, Texts
from openrlhf.serving.server import listen, reward_app, run_server


def lengths(texts: Texts) -> list[float]:
    if any(len(text) == 13 for text in texts):
        raise RuntimeError("cannot score 13")
    return [math.nan if len(text) == 17 else float(len(text)) for text in texts]


def characters(texts: list[str]) -> Texts:
    return [list(map(ord, text)) for text in texts]


def app(
    *,
    tokenize: Callable[[list[str]], Texts] = characters,
    score: Callable[[Texts], list[float]] = lengths,
    texts: int = 4,
    mib: float = 0.001,
) -> FastAPI:
    batcher = Batcher(score, max_tokens=100, max_wait=0.0)
    return reward_app(tokenize, batcher, max_texts=texts, max_mib=mib)


def post(body: Any, *, mib: float = 0.001) -> Any:
    """Send a request to a server that accepts up to four texts and about 1000 bytes."""
    with TestClient(app(mib=mib)) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return client.post("/get_reward", content=content)


def test_response_has_rewards_scores_and_extra_logs_in_text_order() -> None:
    answer = post({"query": ["one", "three", "to"]})
    assert answer.status_code == 200
    assert answer.json() == {
        "rewards": [3.0, 5.0, 2.0],
        "scores": [3.0, 5.0, 2.0],
        "extra_logs": {"dummy_scores": [3.0, 5.0, 2.0]},
    }


def test_request_entries_other_than_query_are_ignored() -> None:
    body = {"query": ["one"], "prompts": None, "labels": [1, {"a": 2}], "more": "x"}
    assert post(body).json()["rewards"] == [3.0]


# Each row: request body, response status, and beginning of the error message.
INVALID: list[tuple[Any, int, str]] = [
    (b"", 422, "The request: Invalid JSON"),
    (b"query=one", 422, "The request: Invalid JSON"),
    (b'{"query": ["\xff"]}', 422, "The request: Invalid JSON: invalid unicode"),
    (["one"], 422, "The request: Input should be an object"),
    ({"queries": ["one"]}, 422, "query: Field required"),
    ({"query": "one"}, 422, "query: Input should be a valid array"),
    ({"query": None}, 422, "query: Input should be a valid array"),
    ({"query": {"0": "one"}}, 422, "query: Input should be a valid array"),
    ({"query": []}, 422, "query: List should have at least 1 item"),
    ({"query": ["one", 2]}, 422, "query.1: Input should be a valid string"),
    ({"query": ["one", ["two"]]}, 422, "query.1: Input should be a valid string"),
    ({"query": ["one", ""]}, 422, "query.1: "),
    ({"query": ["one", "\ud800"]}, 422, "The request: Invalid JSON: unexpected end of hex escape"),
]


@pytest.mark.parametrize(
    ("body", "status", "beginning"), INVALID, ids=[beginning[:40] for _, _, beginning in INVALID]
)
def test_invalid_request_returns_the_error_location_and_an_example(
    body: Any, status: int, beginning: str
) -> None:
    answer = post(body)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(beginning)
    assert '{"query": ["prompt and response"]}' in answer.json()["detail"]


def test_request_with_too_many_texts_returns_status_413_with_both_numbers_and_the_flag() -> None:
    answer = post({"query": ["x"] * 5})
    assert answer.status_code == 413
    assert {"5", "4", "(--max_request_texts)."} <= set(answer.json()["detail"].split())


def test_request_that_is_too_large_returns_status_413_with_the_limit_and_the_flag() -> None:
    answer = post({"query": ["x" * 1100]})
    assert answer.status_code == 413
    assert {"0.001", "MiB", "(--max_request_mib)."} <= set(answer.json()["detail"].split())


def test_deeply_nested_lists_are_rejected_as_invalid_json() -> None:
    assert post(b"[" * 100_000, mib=1.0).status_code == 422


def test_body_without_a_content_length_is_rejected_when_it_becomes_too_large() -> None:
    with TestClient(app()) as client:
        answer = client.post("/get_reward", content=(b" " * 100 for _ in range(1000)))
    assert (answer.status_code, answer.request.headers.get("content-length")) == (413, None)


def test_model_error_returns_status_500_and_logs_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = post({"query": ["x" * 13]})
    assert answer.status_code == 500
    assert "RuntimeError: cannot score 13" in answer.json()["detail"]
    log = capsys.readouterr().err
    assert "Traceback" in log and "cannot score 13" in log


def test_non_finite_score_returns_status_500_and_its_index() -> None:
    answer = post({"query": ["x", "x" * 17]})
    assert answer.status_code == 500
    detail = answer.json()["detail"]
    assert "query[1]" in detail and "nan" in detail


def test_texts_of_any_length_are_scored() -> None:
    answer = post({"query": ["x", "x" * 65_537]}, mib=1.0)
    assert answer.json()["rewards"] == [1.0, 65_537.0]


def test_short_request_is_tokenized_before_an_earlier_long_one_finishes() -> None:
    """The long request is tokenized in pieces, so the short request gets a turn in between."""
    first_piece = threading.Event()
    order: list[str] = []

    def tokenize(texts: list[str]) -> Texts:
        order.append(texts[0][0])
        if len(order) == 1:
            assert first_piece.wait(60)
        return [[1] for _ in texts]

    async def ask() -> None:
        transport = httpx.ASGITransport(app=served)
        async with (
            served.router.lifespan_context(served),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            long = asyncio.create_task(
                client.post("/get_reward", json={"query": ["l" * 60_000] * 40})
            )
            while not order:
                await asyncio.sleep(0.001)
            short = asyncio.create_task(client.post("/get_reward", json={"query": ["s"]}))
            await asyncio.sleep(0.05)
            first_piece.set()
            assert [(await long).status_code, (await short).status_code] == [200, 200]

    served = app(tokenize=tokenize, texts=40, mib=16)
    asyncio.run(ask())
    assert order[0] == "l" and "s" in order[1:4] and len(order) == 11


def test_texts_of_a_request_are_not_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("DEBUG", logger="openrlhf"):
        post({"query": ["secret"]})
        post({"query": ["secretsecret?"]})  # the model raises an error for these 13 tokens
    printed = capsys.readouterr()
    assert "cannot score 13" in printed.err
    assert "secret" not in caplog.text + printed.out + printed.err


def test_unusable_address_is_rejected_before_the_model_is_loaded() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--host 127.0.0.1 --port {port}: Address already in use"
        ):
            run_server(
                amend(ServeConfig(), {"port": port, "reward.model_name_or_path": "/nowhere"})
            )
    with pytest.raises(
        ConfigError,
        match=r"--host no\.such\.host\.invalid --port 0",
    ):
        listen("no.such.host.invalid", 0)


def test_health_endpoint_returns_status_ok() -> None:
    with TestClient(app()) as client:
        assert client.get("/health").json() == {"status": "ok"}
