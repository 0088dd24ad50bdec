"""Concurrent requests: which of them share a batch, who gets which scores, and whom a failure
reaches.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from openrlhf.serving.batcher import Batcher, Texts

HOURS = 3600.0  # nobody who waits so long gets to the end of a test


class Model:
    """The score of a text is its first token, 13 fails. Each batch waits for `turns`; `batches`
    keeps what came.
    """

    def __init__(self, *, turns: int = 1000) -> None:
        self.turns = threading.Semaphore(turns)
        self.batches: list[Texts] = []

    def __call__(self, texts: Texts) -> list[float]:
        self.batches.append(texts)
        assert self.turns.acquire(timeout=60)
        if any(text[0] == 13 for text in texts):
            raise RuntimeError("13 is not liked")
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


async def under_way(
    batcher: Batcher, model: Model, *requests: Texts
) -> list[asyncio.Task[list[float]]]:
    """Requests that are asked while the first is with the model, which has no turn yet."""
    tasks = [asyncio.create_task(batcher.scores(requests[0]))]
    while not model.batches:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(batcher.scores(texts)) for texts in requests[1:]]
    await asyncio.sleep(0)
    return tasks


def batches_of(*requests: Texts, tokens: int = 100) -> tuple[list[Texts], list[list[float]]]:
    """The batches that requests come to, all but the first asked while the model is busy with that;
    and their answers.
    """

    async def ask() -> tuple[list[Texts], list[list[float]]]:
        model = Model(turns=0)
        async with batching(model, tokens=tokens) as batcher:
            tasks = await under_way(batcher, model, *requests)
            model.turns.release(100)
            return model.batches, await asyncio.gather(*tasks)

    return asyncio.run(ask())


def test_what_waits_while_the_model_is_busy_goes_through_it_together_and_each_gets_its_own_scores() -> (
    None
):
    batches, answers = batches_of([[1]], [[2], [3]], [[4]], [[5], [6], [7]])
    assert batches == [[[1]], [[2], [3], [4], [5], [6], [7]]]
    assert answers == [[1], [2, 3], [4], [5, 6, 7]]


def test_a_batch_is_filled_to_the_number_of_tokens_in_the_order_of_arrival() -> None:
    batches, answers = batches_of([[1]], [[2] * 6], [[3] * 4], [[4] * 1], [[5] * 9], tokens=10)
    assert [len(batch) for batch in batches] == [1, 2, 2]
    assert answers == [[1], [2], [3], [4], [5]]


def test_a_request_over_the_limit_is_a_batch_by_itself() -> None:
    batches, answers = batches_of([[1]], [[2]], [[3] * 8, [4] * 8, [5] * 8], [[6]], tokens=10)
    assert [len(batch) for batch in batches] == [1, 1, 3, 1]
    assert answers[2] == [3, 4, 5]


def test_a_request_that_fails_does_so_alone() -> None:
    async def ask() -> tuple[Model, list[object]]:
        model = Model(turns=0)
        async with batching(model) as batcher:
            tasks = await under_way(batcher, model, [[1]], [[2]], [[13]], [[3], [4]])
            model.turns.release(100)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert await batcher.scores([[5]]) == [5.0]
            return model, answers

    model, answers = asyncio.run(ask())
    assert [answers[0], answers[1], answers[3]] == [[1.0], [2.0], [3.0, 4.0]]
    assert str(answers[2]) == "13 is not liked"
    assert [len(batch) for batch in model.batches] == [1, 4, 1, 1, 2, 1]


def test_one_that_asks_alone_never_waits_for_others() -> None:
    async def ask() -> list[list[float]]:
        async with batching(Model(), wait=HOURS) as batcher:
            return [await batcher.scores([[number]]) for number in range(5)]

    assert asyncio.run(ask()) == [[0], [1], [2], [3], [4]]


def test_as_many_as_the_last_batch_had_are_waited_for() -> None:
    async def ask() -> Model:
        model = Model(turns=0)
        async with batching(model, wait=HOURS) as batcher:
            tasks = await under_way(batcher, model, [[1]], [[2]], [[3]])
            model.turns.release(100)
            await asyncio.gather(*tasks)
            early = asyncio.create_task(batcher.scores([[4]]))
            await asyncio.sleep(0.05)
            assert len(model.batches) == 2 and not early.done()
            assert await asyncio.gather(early, batcher.scores([[5]])) == [[4], [5]]
            return model

    assert asyncio.run(ask()).batches == [[[1]], [[2], [3]], [[4], [5]]]


def test_those_who_do_not_come_are_not_waited_for_twice() -> None:
    async def ask() -> list[list[float]]:
        model = Model(turns=0)
        async with batching(model, wait=0.05) as batcher:
            tasks = await under_way(batcher, model, [[1]], [[2]], [[3]])
            model.turns.release(100)
            await asyncio.gather(*tasks)
            await batcher.scores([[4]])
            batcher._max_wait = HOURS
            return [await batcher.scores([[5]])]

    assert asyncio.run(ask()) == [[5]]


def test_the_event_loop_goes_on_while_texts_are_scored() -> None:
    async def ask() -> list[float]:
        model = Model(turns=0)
        async with batching(model) as batcher:
            (task,) = await under_way(batcher, model, [[1]])
            await asyncio.sleep(0.01)  # comes back although the model is stuck
            model.turns.release()
            return await task

    assert asyncio.run(ask()) == [1]


def test_a_request_that_nobody_waits_for_any_more_disturbs_no_other() -> None:
    async def ask() -> list[float]:
        model = Model(turns=0)
        async with batching(model) as batcher:
            tasks = await under_way(batcher, model, [[1]], [[2]], [[13]], [[3]])
            for task in tasks[:3]:
                task.cancel()
            model.turns.release(100)
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            return await tasks[3]

    assert asyncio.run(ask()) == [3]
