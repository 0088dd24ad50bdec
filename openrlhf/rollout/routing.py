"""Which engine is asked: the one that has the prefix, unless it is far busier than another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

SLACK = 8  # samples: engines this close to each other are equally busy
MOST_KEYS = 100_000  # remembered; a prefix that old has left the engine's cache


class Router:
    """Spreads samples over engines by how many each has in flight; not thread-safe.

    What shares a prefix shares a key (the samples of a prompt, the turns of an episode), and goes to the engine that was
    picked for the key last: that one need not prefill the prefix again. It goes to the least busy engine instead where
    the key's engine has more than `SLACK` and more than half again as many samples of *other* keys in flight.
    """

    def __init__(self, engines: int) -> None:
        self.in_flight = [0] * engines
        self._homes: dict[Hashable, int] = {}  # the key asked for longest ago first
        self._of_key: Counter[tuple[Hashable, int]] = Counter()

    def pick(self, key: Hashable, samples: int = 1) -> int:
        """The engine for `samples` more samples of `key`, which are in flight until `done`."""
        idlest = min(range(len(self.in_flight)), key=self.in_flight.__getitem__)
        least = self.in_flight[idlest]
        home = self._homes.pop(key, idlest)
        others = self.in_flight[home] - self._of_key[key, home]
        engine = idlest if others > max(least + SLACK, 1.5 * least) else home
        self._homes[key] = engine
        if len(self._homes) > MOST_KEYS:
            del self._homes[next(iter(self._homes))]
        self.in_flight[engine] += samples
        self._of_key[key, engine] += samples
        return engine

    def done(self, key: Hashable, engine: int, samples: int = 1) -> None:
        """These samples, for which `engine` was picked, are answered or given up."""
        self.in_flight[engine] -= samples
        self._of_key[key, engine] -= samples
        if not self._of_key[key, engine]:
            del self._of_key[key, engine]
