"""The choice of an engine: the engine that has the prefix in its cache, unless it is far busier than another."""

from collections import Counter
from collections.abc import Hashable

SLACK = 8  # samples: engines this close to each other are equally busy
MOST_KEYS = 100_000  # keys to remember; the prefix of an older key has left the engine's cache


class Router:
    """Spreads samples over engines by the number of samples in flight. Not thread-safe.

    Samples with the same prefix have the same key (the samples of a prompt, the turns of an episode). They go to the
    engine that the key had last, because that engine need not prefill the prefix again. The exception is a busy engine:
    if its samples of *other* keys are more than `SLACK` above, and more than 1.5 times, the samples of the least busy
    engine, the least busy engine is picked.
    """

    def __init__(self, engines: int) -> None:
        self.in_flight = [0] * engines
        self._homes: dict[Hashable, int] = {}  # the last engine of each key, the least recent key first
        self._of_key: Counter[tuple[Hashable, int]] = Counter()

    def pick(self, key: Hashable, samples: int = 1) -> int:
        """The engine for `samples` more samples of `key`. They are in flight until `done` is called."""
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
        """Note that these samples of `engine` are finished or cancelled."""
        self.in_flight[engine] -= samples
        self._of_key[key, engine] -= samples
        if not self._of_key[key, engine]:
            del self._of_key[key, engine]
