"""The seconds that the parts of a step take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Measures the parts of a step by name. A part may run several times in a step.

    `show` gets the name of each part as it begins, to show what the run is doing.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the part `name`, unless the block raises."""
        self.show(name.replace("_", " "))
        start = time.perf_counter()
        yield
        taken = time.perf_counter() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + taken

    def take(self, name: str) -> float:
        """Return the seconds of one part, and forget this part."""
        return self._seconds.pop(name)

    def take_all(self) -> dict[str, float]:
        """Return the seconds of every part, and begin the next step."""
        taken = self._seconds
        self._seconds = {}
        return taken
