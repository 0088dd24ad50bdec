"""Merges concurrent requests into batches and deals the results back. Knows neither HTTP nor models."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

Texts = list[list[int]]  # token ids of each


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    texts: Texts
    scores: asyncio.Future[list[float]]


class Batcher:
    """What waits while `score` is busy goes through it together as soon as it is free.

    Requests stay whole and in order. A batch holds as many as `max_texts` (None: any number) and `max_tokens` allow, and one
    at least. A free `score` waits up to `max_wait` seconds for as many requests as the last batch had: clients that ask again
    as soon as they are answered meet each time, and one that is alone never waits. `score` runs in a thread of its own.
    """

    def __init__(
        self, score: Callable[[Texts], list[float]], *, max_texts: int | None, max_tokens: int, max_wait: float
    ) -> None:
        self._score = score
        self._max_texts, self._max_tokens, self._max_wait = max_texts, max_tokens, max_wait
        self._waiting: deque[_Request] = deque()
        self._arrival = asyncio.Event()
        self._last = 1  # requests of the last batch
        self._thread = ThreadPoolExecutor(1, "score")

    async def scores(self, texts: Texts) -> list[float]:
        """The scores of a request's texts, in their order. Raises what `score` raises for them."""
        request = _Request(texts=texts, scores=asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrival.set()
        return await request.scores

    async def run(self) -> None:
        """Score what comes, until cancelled."""
        while True:
            await self._gather()
            batch = self._take()
            self._last = len(batch)
            await self._answer(batch)

    async def _gather(self) -> None:
        while not self._waiting:
            await self._next_arrival()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait):
                while len(self._waiting) < self._last:
                    await self._next_arrival()

    async def _next_arrival(self) -> None:
        self._arrival.clear()
        await self._arrival.wait()

    def _take(self) -> list[_Request]:
        batch: list[_Request] = []
        texts = tokens = 0
        while self._waiting:
            request = self._waiting[0]
            texts, tokens = texts + len(request.texts), tokens + sum(map(len, request.texts))
            if batch and (tokens > self._max_tokens or texts > (self._max_texts or texts)):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _answer(self, batch: list[_Request]) -> None:
        texts = [text for request in batch for text in request.texts]
        try:
            scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, texts)
        except Exception as error:
            if len(batch) > 1:  # one of them may be to blame: by itself it fails by itself
                for request in batch:
                    await self._answer([request])
            elif not batch[0].scores.cancelled():
                batch[0].scores.set_exception(error)
            return
        dealt = iter(scores)
        for request in batch:
            mine = [next(dealt) for _ in request.texts]
            if not request.scores.cancelled():
                request.scores.set_result(mine)
