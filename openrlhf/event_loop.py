"""An event loop in its own thread. Standard library only."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """An event loop that runs coroutines for other threads."""

    def __init__(self, name: str = "event-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, and return its future result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread.

        The loop stays open, because threads that worked for it may still report their results.
        """
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
