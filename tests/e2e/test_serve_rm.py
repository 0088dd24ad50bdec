"""End-to-end tests of the reward server: concurrent clients, invalid requests, and shutdown."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.e2e.processes import descendants, survivors
from tests.e2e.servers import RewardModelServer, reward_model_server
from tests.tiny import character_tokenizer, tiny_config

CLIENT = httpx.Client(timeout=60)  # shared by all threads
CLIENTS, REQUESTS = 16, 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = tiny_config("qwen3", num_labels=1, mean=0.25, std=0.5)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RewardModelServer]:
    with reward_model_server(
        model, max_request_texts=64, max_request_mib=0.5, data__max_len=64
    ) as running:
        yield running


def texts_of(count: int, seed: int) -> list[str]:
    """Return texts of different lengths, some of them too long for the server."""
    draw = random.Random(seed)
    letters = "abcdefghij0123456789"
    return [
        "".join(draw.choices(letters, k=draw.randint(1, 80))) + draw.choice(["", "<eos>"])
        for _ in range(count)
    ]


def scores_of_transformers(model: Path, texts: list[str], *, max_len: int = 64) -> list[float]:
    hf = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = character_tokenizer()
    with torch.no_grad():
        return [
            float(hf(torch.tensor([tokenizer(text)["input_ids"][-max_len:]])).logits)
            for text in texts
        ]


def ask(url: str, texts: list[str]) -> list[float]:
    answer = CLIENT.post(url, json={"query": texts})
    assert answer.status_code == 200, answer.text
    return answer.json()["rewards"]


def port_of(server: RewardModelServer) -> int:
    return httpx.URL(server.url).port or 80


def test_concurrent_clients_each_get_the_scores_of_their_own_texts(
    server: RewardModelServer, model: Path
) -> None:
    requests = [texts_of(1 + number % 5, seed=number) for number in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda texts: ask(server.url, texts), requests))
    expected = scores_of_transformers(model, [text for texts in requests for text in texts])
    assert [len(scores) for scores in answers] == [len(texts) for texts in requests]
    assert [score for scores in answers for score in scores] == pytest.approx(expected, abs=1e-5)


def test_response_follows_the_api_contract(server: RewardModelServer) -> None:
    body = {"query": ["1+1=2<eos>", "ab"], "prompts": ["1+1=", "a"], "labels": ["2", None]}
    answer = CLIENT.post(server.url, json=body).json()
    assert list(answer) == ["rewards", "scores", "extra_logs"]
    assert len(answer["rewards"]) == 2
    assert answer["scores"] == answer["extra_logs"]["dummy_scores"] == answer["rewards"]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"no json", 422, "The request: Invalid JSON"),
        (b'{"queries": ["a"]}', 422, "query: Field required. Expected format:"),
        (b'{"query": "a"}', 422, "query: Input should be a valid array"),
        (b'{"query": []}', 422, "query: List should have at least 1 item"),
        (b'{"query": ["a", null]}', 422, "query.1: Input should be a valid string"),
        (b'{"query": ["a", "\\ud800"]}', 422, "The request: Invalid JSON"),
        (b'{"query": [' + b'"a",' * 64 + b'"a"]}', 413, "query has 65 texts"),
        (b'{"query": ["' + b"a" * 2**20 + b'"]}', 413, "The request is larger than 0.5 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_request_gets_an_error_message_and_the_server_keeps_running(
    server: RewardModelServer, body: bytes, status: int, sentence: str
) -> None:
    answer = CLIENT.post(server.url, content=body)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(sentence)
    assert len(ask(server.url, ["a"])) == 1


def test_health_endpoint_returns_ok(server: RewardModelServer) -> None:
    assert CLIENT.get(server.url.replace("get_reward", "health")).json() == {"status": "ok"}


def test_server_listens_only_on_the_loopback_address(server: RewardModelServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [
        local
        for _, local, _, state, *_ in rows
        if state == "0A" and int(local.split(":")[1], 16) == port_of(server)
    ]
    assert listening == [f"0100007F:{port_of(server):04X}"]


def test_normalized_packed_scores_differ_only_in_scale(
    server: RewardModelServer, model: Path
) -> None:
    texts = texts_of(20, seed=1)
    raw = ask(server.url, texts)
    flags = {
        "reward__normalize_enable": True,
        "ds__packing_samples": True,
        "batch_size": 1,
        "data__max_len": 64,
    }
    with reward_model_server(model, **flags) as other:
        assert ask(other.url, texts) == pytest.approx(
            [(score - 0.25) / 0.5 for score in raw], abs=1e-5
        )


def test_stopped_server_leaves_no_processes_and_frees_its_port(
    model: Path,
) -> None:
    port, scores = 0, []
    for how, status in [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]:
        with reward_model_server(model, port=port) as server:
            scores.append(ask(server.url, ["a", "b"]))
            port = port_of(server)
            family = descendants(server.process.pid)
            server.process.send_signal(how)
            _, errors = server.process.communicate(timeout=300)
            assert server.process.returncode == status
            assert "Traceback" not in errors
            assert survivors(family, within=60) == []
    assert scores[0] == scores[1]
