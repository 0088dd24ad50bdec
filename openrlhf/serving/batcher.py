"""Groups concurrent requests into batches, without depending on HTTP or models."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

Texts = list[list[int]]  # token ids of each text


class _Request(NamedTuple):
    texts: Texts
    scores: asyncio.Future[list[float]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class Batcher:
    """Batches concurrent requests: requests that arrive while `score` is busy share the next batch.

    A batch takes complete requests in arrival order: at least one request, and no more than fit
    into `max_tokens`. An idle batcher waits up to `max_wait` seconds for as many requests as the
    last batch had. Clients that send requests in lockstep therefore stay in one batch, and a single
    client never waits. `score` runs in its own thread.
    """

    def __init__(
        self, score: Callable[[Texts], list[float]], *, max_tokens: int, max_wait: float
    ) -> None:
        self._score = score
        self._max_tokens = max_tokens
        self._max_wait = max_wait
        self._waiting: deque[_Request] = deque()
        self._arrival = asyncio.Condition()
        self._last_size = 1  # number of requests in the last batch
        self._thread = ThreadPoolExecutor(1, "score")

    async def scores(self, texts: Texts) -> list[float]:
        """Return the scores of a request's texts, in order.

        Raises the exception that `score` raises for these texts.
        """
        request = _Request(texts, asyncio.get_running_loop().create_future())
        async with self._arrival:
            self._waiting.append(request)
            self._arrival.notify()
        return await request.scores

    async def run(self) -> None:
        """Score requests as they arrive, until cancelled."""
        while True:
            async with self._arrival:
                await self._arrival.wait_for(lambda: self._waiting)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._max_wait):
                        await self._arrival.wait_for(lambda: len(self._waiting) >= self._last_size)
            batch = self._next_batch()
            self._last_size = len(batch)
            await self._answer(batch)

    def _next_batch(self) -> list[_Request]:
        batch = [self._waiting.popleft()]
        tokens = batch[0].tokens
        while self._waiting:
            tokens += self._waiting[0].tokens
            if tokens > self._max_tokens:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _answer(self, batch: list[_Request]) -> None:
        texts: Texts = []
        for request in batch:
            texts += request.texts
        loop = asyncio.get_running_loop()
        try:
            scores = iter(await loop.run_in_executor(self._thread, self._score, texts))
        except Exception as error:
            if len(batch) > 1:
                # Score each request alone, so that only the request that caused the error fails.
                for request in batch:
                    await self._answer([request])
            elif not batch[0].scores.cancelled():
                batch[0].scores.set_exception(error)
            return
        for request in batch:
            own_scores = list(islice(scores, len(request.texts)))
            if not request.scores.cancelled():
                request.scores.set_result(own_scores)
