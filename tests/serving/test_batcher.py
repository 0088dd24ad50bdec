"""Tests for batching concurrent requests: which requests form a batch, scores, and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from openrlhf.serving.batcher import Batcher, Texts

HOUR_S = 3600.0  # longer than the test timeout


class Model:
    """A model that scores a text by its first token and raises an error for token 13.

    Each batch waits for a permit from `turns`. `batches` records the batches so far.
    """

    def __init__(self, *, turns: int = 1000) -> None:
        self.turns = threading.Semaphore(turns)
        self.batches: list[Texts] = []

    def __call__(self, texts: Texts) -> list[float]:
        self.batches.append(texts)
        assert self.turns.acquire(timeout=60)
        if any(text[0] == 13 for text in texts):
            raise RuntimeError("cannot score 13")
        return [float(text[0]) for text in texts]


@asynccontextmanager
async def batching(
    model: Callable[[Texts], list[float]], *, tokens: int = 100, wait: float = 0.0
) -> AsyncIterator[Batcher]:
    batcher = Batcher(model, max_tokens=tokens, max_wait=wait)
    running = asyncio.create_task(batcher.run())
    yield batcher
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def send_while_busy(
    batcher: Batcher, model: Model, *requests: Texts
) -> list[asyncio.Task[list[float]]]:
    """Send the first request, then the other requests while the model is busy with the first."""
    tasks = [asyncio.create_task(batcher.scores(requests[0]))]
    while not model.batches:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(batcher.scores(texts)) for texts in requests[1:]]
    await asyncio.sleep(0)
    return tasks


def batches_of(*requests: Texts, tokens: int = 100) -> tuple[list[Texts], list[list[float]]]:
    """Return the batches that are formed and the scores of each request.

    All other requests are sent while the model scores the first request.
    """

    async def ask() -> tuple[list[Texts], list[list[float]]]:
        model = Model(turns=0)
        async with batching(model, tokens=tokens) as batcher:
            tasks = await send_while_busy(batcher, model, *requests)
            model.turns.release(100)
            return model.batches, await asyncio.gather(*tasks)

    return asyncio.run(ask())


def test_requests_that_arrive_while_the_model_is_busy_share_a_batch_and_get_their_own_scores() -> (
    None
):
    batches, answers = batches_of([[1]], [[2], [3]], [[4]], [[5], [6], [7]])
    assert batches == [[[1]], [[2], [3], [4], [5], [6], [7]]]
    assert answers == [[1], [2, 3], [4], [5, 6, 7]]


def test_batch_takes_requests_in_arrival_order_up_to_max_tokens() -> None:
    batches, answers = batches_of([[1]], [[2] * 6], [[3] * 4], [[4] * 1], [[5] * 9], tokens=10)
    assert [len(batch) for batch in batches] == [1, 2, 2]
    assert answers == [[1], [2], [3], [4], [5]]


def test_request_above_max_tokens_gets_its_own_batch() -> None:
    batches, answers = batches_of([[1]], [[2]], [[3] * 8, [4] * 8, [5] * 8], [[6]], tokens=10)
    assert [len(batch) for batch in batches] == [1, 1, 3, 1]
    assert answers[2] == [3, 4, 5]


def test_request_that_cannot_be_scored_fails_alone_and_the_rest_of_its_batch_succeeds() -> None:
    async def ask() -> tuple[Model, list[object]]:
        model = Model(turns=0)
        async with batching(model) as batcher:
            tasks = await send_while_busy(batcher, model, [[1]], [[2]], [[13]], [[3], [4]])
            model.turns.release(100)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert await batcher.scores([[5]]) == [5.0]
            return model, answers

    model, answers = asyncio.run(ask())
    assert [answers[0], answers[1], answers[3]] == [[1.0], [2.0], [3.0, 4.0]]
    assert str(answers[2]) == "cannot score 13"
    assert [len(batch) for batch in model.batches] == [1, 4, 1, 1, 2, 1]


def test_single_client_never_waits_for_other_requests() -> None:
    async def ask() -> list[list[float]]:
        async with batching(Model(), wait=HOUR_S) as batcher:
            return [await batcher.scores([[number]]) for number in range(5)]

    assert asyncio.run(ask()) == [[0], [1], [2], [3], [4]]


def test_batch_waits_for_as_many_requests_as_the_last_batch_had() -> None:
    async def ask() -> Model:
        model = Model(turns=0)
        async with batching(model, wait=HOUR_S) as batcher:
            tasks = await send_while_busy(batcher, model, [[1]], [[2]], [[3]])
            model.turns.release(100)
            await asyncio.gather(*tasks)
            early = asyncio.create_task(batcher.scores([[4]]))
            await asyncio.sleep(0.05)
            assert len(model.batches) == 2 and not early.done()
            assert await asyncio.gather(early, batcher.scores([[5]])) == [[4], [5]]
            return model

    assert asyncio.run(ask()).batches == [[[1]], [[2], [3]], [[4], [5]]]


def test_batch_does_not_wait_for_clients_that_missed_the_last_batch() -> None:
    async def ask() -> list[list[float]]:
        model = Model(turns=0)
        async with batching(model, wait=0.05) as batcher:
            tasks = await send_while_busy(batcher, model, [[1]], [[2]], [[3]])
            model.turns.release(100)
            await asyncio.gather(*tasks)
            await batcher.scores([[4]])
            batcher._max_wait = HOUR_S
            return [await batcher.scores([[5]])]

    assert asyncio.run(ask()) == [[5]]


def test_event_loop_keeps_running_while_texts_are_scored() -> None:
    async def ask() -> list[float]:
        model = Model(turns=0)
        async with batching(model) as batcher:
            (task,) = await send_while_busy(batcher, model, [[1]])
            await asyncio.sleep(0.01)  # the event loop runs although the model is still busy
            model.turns.release()
            return await task

    assert asyncio.run(ask()) == [1]


def test_cancelled_requests_do_not_affect_the_other_requests() -> None:
    async def ask() -> list[float]:
        model = Model(turns=0)
        async with batching(model) as batcher:
            tasks = await send_while_busy(batcher, model, [[1]], [[2]], [[13]], [[3]])
            for task in tasks[:3]:
                task.cancel()
            model.turns.release(100)
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            return await tasks[3]

    assert asyncio.run(ask()) == [3]
