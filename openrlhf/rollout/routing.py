"""The choice of an engine: the engine that has the prefix in its cache, unless it is far busier
than another.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from openrlhf.observability.metrics import Mean

SLACK = 8  # samples: engines this close to each other are equally busy
MOST_KEYS = 100_000  # keys to remember; the prefix of an older key has left the engine's cache


class Router:
    """Spreads samples over engines by the number of samples in flight. `pick` and `done` belong to
    one thread.

    Samples with the same prefix have the same key (the samples of a prompt, the turns of an
    episode). They go to the engine that the key had last, because that engine need not prefill the
    prefix again. The exception is a busy engine: if its samples of *other* keys are more than
    `SLACK` above, and more than 1.5 times, the samples of the least busy engine, the least busy
    engine is picked.
    """

    def __init__(self, engines: Iterable[int]) -> None:
        self._asked = time.monotonic()  # when `idle` was last asked
        self.in_flight: dict[int, int] = {}
        self._idle = defaultdict[int, float](float)  # seconds since then, up to the last change
        self._changed: dict[int, float] = {}
        for engine in engines:
            self.add(engine)
        self._homes: dict[
            Hashable, int
        ] = {}  # the last engine of each key, the least recent key first
        self._of_key: Counter[tuple[Hashable, int]] = Counter()

    def add(self, engine: int) -> None:
        """An engine that is new, or has nothing in its cache any more."""
        self.in_flight.setdefault(engine, 0)
        self._changed.setdefault(engine, time.monotonic())

    def pick(self, key: Hashable, samples: int = 1, *, among: Sequence[int] = ()) -> int:
        """The engine for `samples` more samples of `key`, by default one of all. In flight until
        `done` is called.
        """
        usable = among or list(self.in_flight)
        idlest = min(usable, key=self.in_flight.__getitem__)
        least = self.in_flight[idlest]
        home = self._homes.pop(key, idlest)
        others = self.in_flight[home] - self._of_key[key, home]
        engine = home if home in usable and others <= max(least + SLACK, 1.5 * least) else idlest
        self._homes[key] = engine
        self._note(engine, time.monotonic())
        if len(self._homes) > MOST_KEYS:
            del self._homes[next(iter(self._homes))]
        self.in_flight[engine] += samples
        self._of_key[key, engine] += samples
        return engine

    def done(self, key: Hashable, engine: int, samples: int = 1) -> None:
        """Note that these samples of `engine` are finished or cancelled."""
        self._note(engine, time.monotonic())
        self.in_flight[engine] -= samples
        self._of_key[key, engine] -= samples
        if not self._of_key[key, engine]:
            del self._of_key[key, engine]

    def _note(self, engine: int, now: float) -> None:
        """Count the time since the last change as idle, if the engine had no sample."""
        self._idle[engine] += (now - self._changed[engine]) * (not self.in_flight[engine])
        self._changed[engine] = now

    def idle(self, engines: Iterable[int]) -> Mean:
        """The share of these engines' time without a sample, since the last call. Others have left,
        or not been added.
        """
        now = time.monotonic()
        for engine in list(self.in_flight):  # engines may join meanwhile
            self._note(engine, now)
        idle, self._idle = (
            [self._idle[each] for each in self._idle.keys() & engines],
            defaultdict(float),
        )
        asked, self._asked = self._asked, now
        return Mean(sum(idle), len(idle) * (now - asked))
