"""Merges concurrent requests into batches and gives each request its own scores. Knows neither HTTP
nor models.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

Texts = list[list[int]]  # the token ids of each text


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    texts: Texts
    scores: asyncio.Future[list[float]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class Batcher:
    """Scores requests in batches: those that arrive while `score` is busy go through it together
    next.

    Requests stay whole and in order. A batch has at least one request, and no more than fit into
    `max_tokens`. An idle `score` waits up to `max_wait` seconds for as many requests as the last
    batch had: clients that ask again as soon as they have their scores meet in one batch each time,
    and a single client never waits. `score` runs in its own thread.
    """

    def __init__(
        self, score: Callable[[Texts], list[float]], *, max_tokens: int, max_wait: float
    ) -> None:
        self._score = score
        self._max_tokens, self._max_wait = max_tokens, max_wait
        self._waiting: deque[_Request] = deque()
        self._arrival = asyncio.Condition()
        self._last = 1  # number of requests in the last batch
        self._thread = ThreadPoolExecutor(1, "score")

    async def scores(self, texts: Texts) -> list[float]:
        """The scores of a request's texts, in their order. Raises the exception that `score` raises
        for them.
        """
        request = _Request(texts=texts, scores=asyncio.get_running_loop().create_future())
        async with self._arrival:
            self._waiting.append(request)
            self._arrival.notify()
        return await request.scores

    async def run(self) -> None:
        """Score requests as they arrive, until cancelled."""
        while True:
            await self._arrivals()
            batch = self._next_batch()
            self._last = len(batch)
            await self._answer(batch)

    async def _arrivals(self) -> None:
        async with self._arrival:
            await self._arrival.wait_for(lambda: self._waiting)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._max_wait):
                    await self._arrival.wait_for(lambda: len(self._waiting) >= self._last)

    def _next_batch(self) -> list[_Request]:
        batch = [self._waiting.popleft()]
        tokens = batch[0].tokens
        while self._waiting and tokens + self._waiting[0].tokens <= self._max_tokens:
            batch.append(self._waiting.popleft())
            tokens += batch[-1].tokens
        return batch

    async def _answer(self, batch: list[_Request]) -> None:
        texts = [text for request in batch for text in request.texts]
        try:
            scores = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._score, texts
            )
        except Exception as error:
            if len(batch) > 1:  # one request may be to blame: alone, only that one fails
                for request in batch:
                    await self._answer([request])
            elif not batch[0].scores.cancelled():
                batch[0].scores.set_exception(error)
            return
        rest = iter(scores)
        for request in batch:
            own = [next(rest) for _ in request.texts]
            if not request.scores.cancelled():
                request.scores.set_result(own)
