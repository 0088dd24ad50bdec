"""Time in seconds spent in each part of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Measures the named parts of a step. A part may run several times in a step.

    `show` is called with the name of each part as it begins, to display the run's status.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's duration to the part `name`, unless the block raises."""
        self.show(name.replace("_", " "))
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def take(self, name: str) -> float:
        """Return the seconds spent in one part, and reset that part."""
        return self._seconds.pop(name)

    def take_all(self) -> dict[str, float]:
        """Return the seconds spent in each part, and reset all parts."""
        taken = self._seconds
        self._seconds = defaultdict(float)
        return taken
