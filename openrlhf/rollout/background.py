"""Runs asynchronous generation for synchronous code."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from openrlhf.config.flags import UserError
from openrlhf.event_loop import EventLoopThread

T = TypeVar("T")
CLOSE_TIMEOUT_S = 60.0  # time allowed for cancelled samples to finish
END = object()
# What the run waits for.
NEXT_GROUP = "generate and reward the next group of samples"
CANCEL = "cancel the samples in progress"
# What to do about a wait that timed out.
SLOW_STEP = "If the run is merely slow, increase --train.step_timeout."
LONG_RESPONSES = (
    "If the responses are merely long, increase --train.step_timeout, or lower "
    "--rollout.max_new_tokens or --rollout.batch_size."
)


class RolloutError(UserError, RuntimeError):
    """Error for generation that failed or timed out."""


class BackgroundLoop(EventLoopThread):
    """One event loop that runs coroutines for synchronous code: generation and rewards."""

    def run(
        self,
        work: Coroutine[Any, Any, T],
        timeout_s: float,
        *,
        doing: str,
        hint: str = LONG_RESPONSES,
    ) -> T:
        """Return the result of `work`.

        `doing` completes the message "the run did not <doing> within …", and `hint` says what to
        do. Raises RolloutError if `work` takes longer than `timeout_s` seconds.
        """
        future = self.submit(asyncio.wait_for(work, timeout_s))
        try:
            return future.result()
        except TimeoutError as error:
            message = f"the run did not {doing} within {timeout_s:g} s. {hint}".strip()
            raise RolloutError(message) from error
        except BaseException:  # for example, Ctrl-C: the result is no longer needed
            future.cancel()
            raise

    def iterate(self, stream: AsyncGenerator[T], timeout_s: float) -> Iterator[T]:
        """Yield the groups of samples in `stream`, and close the stream at the end.

        Raises RolloutError if a group takes longer than `timeout_s` seconds.
        """

        async def advance() -> Any:
            return await anext(stream, END)

        try:
            while (item := self.run(advance(), timeout_s, doing=NEXT_GROUP)) is not END:
                yield item
        finally:
            with suppress(RuntimeError):  # the stream is still being cancelled after Ctrl-C
                self.run(stream.aclose(), CLOSE_TIMEOUT_S, doing=CANCEL, hint="")
