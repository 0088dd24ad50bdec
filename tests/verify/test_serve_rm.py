"""The reward server under load, with and without batching.

A client sends its next request as soon as it gets a response.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.e2e.servers import reward_model_server
from tests.tiny import character_tokenizer, tiny_config
from tests.verify.results import write_result

pytestmark = pytest.mark.verify
CLIENTS = (1, 8, 32)
REQUESTS = 960  # number of requests for each row of the table
# Each round sends a third of the requests.
# The servers take turns, so that other load on the machine affects all servers equally.
ROUNDS = 3
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SERVERS = {
    "one text at a time": {"batch_size": 1},
    "batches, padded": {},
    "batches, packed": {"ds__packing_samples": True},
}


@dataclass
class Cell:
    """Measurements of one server's clients: seconds for each request, and seconds in total."""

    latencies: list[float]
    seconds: float = 0.0

    def row(self) -> list[str]:
        """Return requests per second, and median and 99th-percentile latency in milliseconds."""
        cuts = statistics.quantiles(self.latencies, n=100)
        return [
            f"{len(self.latencies) / self.seconds:.0f}",
            f"{1000 * statistics.median(self.latencies):.1f}",
            f"{1000 * cuts[98]:.1f}",
        ]


def save_model(path: Path) -> Path:
    torch.manual_seed(0)
    config = tiny_config("qwen3", num_labels=1, **SIZES)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def texts_of(count: int) -> list[str]:
    draw = random.Random(0)
    return [
        "".join(draw.choices("abcdefghij 0123456789", k=draw.randint(20, 200))) + "<eos>"
        for _ in range(count)
    ]


async def load(url: str, texts: list[str], clients: int, cell: Cell) -> list[float]:
    """Score texts with one request each, sent by `clients` concurrent clients."""
    scores = [0.0] * len(texts)
    waiting = iter(enumerate(texts))

    async def client(connection: httpx.AsyncClient) -> None:
        for number, text in waiting:
            start = time.perf_counter()
            answer = await connection.post(url, json={"query": [text]})
            cell.latencies.append(time.perf_counter() - start)
            assert answer.status_code == 200, answer.text
            (scores[number],) = answer.json()["rewards"]

    async with httpx.AsyncClient(timeout=120) as connection:
        start = time.perf_counter()
        await asyncio.gather(*(client(connection) for _ in range(clients)))
        cell.seconds += time.perf_counter() - start
    return scores


@pytest.mark.timeout(1800)
def test_batching_changes_no_score_and_its_speedup_is_recorded(tmp_path: Path) -> None:
    model, texts = save_model(tmp_path), texts_of(REQUESTS)
    cells = {(clients, name): Cell([]) for clients in CLIENTS for name in SERVERS}
    with ExitStack() as running:
        urls = {
            name: running.enter_context(reward_model_server(model, **flags)).url
            for name, flags in SERVERS.items()
        }
        for url in urls.values():
            asyncio.run(load(url, texts[:64], 8, Cell([])))  # warmup
        share = REQUESTS // ROUNDS
        for number in range(ROUNDS):
            asked = texts[number * share : (number + 1) * share]
            for clients in CLIENTS:
                answers = {
                    name: asyncio.run(load(url, asked, clients, cells[clients, name]))
                    for name, url in urls.items()
                }
                first, *others = answers.values()
                assert all(scores == pytest.approx(first, abs=1e-5) for scores in others)
    rows = [[clients, name, *cells[clients, name].row()] for clients, name in cells]
    write_result(
        "serve_rm",
        "The reward server under load",
        "make verify",
        ["clients at once", "server", "requests per second", "median, ms", "99th percentile, ms"],
        rows,
        f"{REQUESTS} requests per row with one text of 20 to 200 tokens each, in {ROUNDS} rounds "
        "in which the servers take turns. Every client sends its next request as soon as it gets a "
        f"response. The model has {SIZES['num_hidden_layers']} layers of width "
        f"{SIZES['hidden_size']} in float32. Clients and server share {os.cpu_count()} cores; each "
        f"server uses {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s). All servers returned "
        "the same score for every text to within 1e-5. `one text at a time` is `--batch_size 1`.",
    )
