"""Selects the engine with the cached prefix, unless another engine is much less busy."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from openrlhf.observability.metrics import Mean

SLACK = 8  # engines whose loads differ by at most this number of samples count as equally busy
MOST_KEYS = 100_000  # maximum number of keys; the prefixes of older keys are no longer cached


class Router:
    """A router that distributes samples over engines by the number of samples in flight.

    Samples with the same prefix have the same key: for example, the samples of a prompt or the
    turns of an episode. Samples go to the engine last used for their key, because that engine does
    not need to prefill the prefix again. However, the least busy engine is picked if its samples
    are much fewer than the other engine's samples with *other* keys. The other engine must have
    more than `SLACK` samples more, and more than 1.5 times as many.

    The methods may be called from any thread.
    """

    def __init__(self, engines: Iterable[int]) -> None:
        self.in_flight: dict[int, int] = {}
        self._counting = threading.RLock()
        self._read_at = time.monotonic()  # time of the last call to `idle`
        # Seconds without a sample since the last call to `idle`, up to the engine's last change.
        self._idle: dict[int, float] = defaultdict(float)
        self._changed: dict[int, float] = {}
        for engine in engines:
            self.add(engine)
        # The last engine used for each key; the least recently used key comes first.
        self._homes: dict[Hashable, int] = {}
        self._of_key: Counter[tuple[Hashable, int]] = Counter()

    def add(self, engine: int) -> None:
        """Add an engine that is new, or that has restarted with an empty cache."""
        with self._counting:
            self.in_flight.setdefault(engine, 0)
            self._changed.setdefault(engine, time.monotonic())

    def pick(self, key: Hashable, samples: int = 1, *, among: Sequence[int] = ()) -> int:
        """Return the engine for `samples` more samples of `key`, from `among` or from all engines.

        The samples are in flight until `done` is called.
        """
        with self._counting:
            usable = among or list(self.in_flight)
            engine = min(usable, key=self.in_flight.__getitem__)
            least = self.in_flight[engine]
            home = self._homes.pop(key, engine)
            others = self.in_flight[home] - self._of_key[key, home]
            if home in usable and others <= max(least + SLACK, 1.5 * least):
                engine = home
            self._homes[key] = engine
            if len(self._homes) > MOST_KEYS:
                del self._homes[next(iter(self._homes))]
            self._change(key, engine, samples)
        return engine

    def done(self, key: Hashable, engine: int, samples: int = 1) -> None:
        """Record that these samples of `engine` are finished or cancelled."""
        with self._counting:
            self._change(key, engine, -samples)
            if not self._of_key[key, engine]:
                del self._of_key[key, engine]

    def _change(self, key: Hashable, engine: int, samples: int) -> None:
        """Add to the samples in flight."""
        self._count_idle(engine, time.monotonic())
        self.in_flight[engine] += samples
        self._of_key[key, engine] += samples

    def _count_idle(self, engine: int, now: float) -> None:
        """Count the time since the engine's last change as idle if the engine had no samples."""
        if not self.in_flight[engine]:
            self._idle[engine] += now - self._changed[engine]
        self._changed[engine] = now

    def idle(self, engines: Iterable[int]) -> Mean:
        """Return the fraction of time since the last call in which these engines had no samples.

        Engines that were never added are ignored.
        """
        with self._counting:
            now = time.monotonic()
            for engine in self.in_flight:
                self._count_idle(engine, now)
            counted = set(self.in_flight).intersection(engines)
            idle_s = sum(self._idle[engine] for engine in counted)
            passed_s = now - self._read_at
            self._idle = defaultdict(float)
            self._read_at = now
        return Mean(idle_s, len(counted) * passed_s)
