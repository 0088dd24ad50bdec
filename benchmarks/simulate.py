"""Predicts the speed of asynchronous training for a given distribution of episode lengths.

    python -m benchmarks.simulate --prompts 64 --samples 8 --slots 512 --median 30 \
        --sigma 1 --train 20
    python -m benchmarks.simulate --prompts 512 --samples 8 --engines 2000 --slots 4 --queues 1 2 4

No model is needed. Prompts are scheduled and steps are assembled with the same code as in a real
run (`trainers.capacity`).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

from rich.console import Console
from rich.table import Table

from openrlhf.trainers.capacity import Capacity, Held


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload of a run. Times are in seconds.

    An episode takes `median` · exp(`sigma` · z), where z is standard normal.
    """

    prompts: int  # per step
    samples: int  # per prompt
    slots: int  # concurrent episodes, summed over all engines
    median: float
    sigma: float
    train: float  # per step
    publish: float
    steps: int = 50
    seed: int = 1


@dataclass(kw_only=True)
class Outcome:
    """The results of a run: its duration in seconds, idle fractions, and ages of samples."""

    steps: int
    seconds: float
    engines_idle: float
    trainer_idle: float
    lags: Counter[int] = field(default_factory=Counter[int])

    @property
    def per_step(self) -> float:
        """Return the mean seconds per step."""
        return self.seconds / self.steps

    @property
    def lag(self) -> float:
        """Return the mean age of a sample, in weight versions."""
        return fmean(self.lags.elements())


class Engines:
    """Slots that run episodes in arrival order and in simulated time."""

    def __init__(self, work: Workload) -> None:
        self.work, self.draw = work, random.Random(work.seed)
        self.waiting: deque[int] = deque()  # the prompt of each waiting episode
        self.running: list[tuple[float, int, int]] = []  # end time, tie-breaker, prompt
        self.left: Counter[int] = Counter()  # number of unfinished episodes for each prompt
        self.busy = 0.0
        self._numbers = count()

    def add(self, prompt: int, now: float) -> None:
        """Request all samples for a prompt."""
        self.left[prompt] = self.work.samples
        self.waiting.extend([prompt] * self.work.samples)
        self._fill(now)

    def _fill(self, now: float) -> None:
        while self.waiting and len(self.running) < self.work.slots:
            seconds = self.work.median * math.exp(self.work.sigma * self.draw.gauss(0, 1))
            self.busy += seconds
            heapq.heappush(
                self.running, (now + seconds, next(self._numbers), self.waiting.popleft())
            )

    def next_end(self) -> float:
        """Return the time at which the next episode ends."""
        return self.running[0][0] if self.running else math.inf

    def end_one(self) -> int | None:
        """End the next episode, and return its prompt if that was the prompt's last sample."""
        now, _, prompt = heapq.heappop(self.running)
        self._fill(now)
        self.left[prompt] -= 1
        return None if self.left[prompt] else prompt

    def pause(self, seconds: float) -> None:
        """Delay the end of all running episodes."""
        self.running = [(end + seconds, number, prompt) for end, number, prompt in self.running]


def synchronous(work: Workload) -> Outcome:
    """Simulate a run that generates, trains and publishes one after another."""
    engines, now, numbers = Engines(work), 0.0, count()
    for _ in range(work.steps):
        for _ in range(work.prompts):
            engines.add(next(numbers), now)
        while engines.running:
            now = engines.next_end()
            engines.end_one()
        now += work.train + work.publish
    return outcome(work, engines, now, Counter({0: work.steps * work.prompts}))


def asynchronous(work: Workload, queue: int, staleness: int, *, partial: bool) -> Outcome:
    """Simulate a run that generates while it trains.

    With `partial`, a publication pauses episodes instead of waiting for them.
    """
    rule = Capacity(batch=work.prompts, queue=queue, staleness=staleness)
    engines, held, lags = Engines(work), dict[int, Held](), Counter[int]()
    now, version, started, steps, trained = 0.0, 0, 0, 0, math.inf
    drains = False
    while True:
        for _ in range(0 if drains else rule.room(list(held.values()))):
            held[started] = Held(version=version)
            engines.add(started, now)
            started += 1
        if trained == math.inf and not drains:
            step = rule.next_step(list(held.values()), version)
            if step is not None:
                for prompt in [list(held)[place] for place in step]:
                    lags[version - held.pop(prompt).version] += 1
                steps, trained = steps + 1, now + work.train
                if steps == work.steps:
                    return outcome(work, engines, trained, lags)
                continue
        now = min(engines.next_end(), trained)
        if now == trained:
            trained, drains = math.inf, True
        elif (prompt := engines.end_one()) is not None:
            held[prompt].finished = True
        if drains and (partial or not engines.running):
            engines.pause(work.publish)
            now, version, drains = now + work.publish, version + 1, False


def outcome(work: Workload, engines: Engines, seconds: float, lags: Counter[int]) -> Outcome:
    """Return a run's outcome."""
    return Outcome(
        steps=work.steps,
        seconds=seconds,
        engines_idle=1 - min(1.0, engines.busy / (seconds * work.slots)),
        trainer_idle=1 - work.steps * work.train / seconds,
        lags=lags,
    )


def rows(work: Workload, queues: list[int], staleness: int | None) -> Iterator[list[str]]:
    """Return a table row for each mode of training.

    A row contains the name, seconds per step, speedup, idle fractions, and mean age.
    """
    base = synchronous(work)
    runs = [("synchronous", base)]
    for queue in queues:
        for partial in (False, True):
            name = f"queue {queue}" + (", partial" if partial else "")
            runs.append((name, asynchronous(work, queue, staleness or queue, partial=partial)))
    for name, run in runs:
        idle = f"{run.engines_idle:.0%}", f"{run.trainer_idle:.0%}"
        yield [
            name,
            f"{run.per_step:.4g}",
            f"{base.per_step / run.per_step:.2f}",
            *idle,
            f"{run.lag:.2f}",
        ]


def positive(text: str) -> int:
    """Parse a positive integer. Raises ValueError for any other text."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def main() -> None:
    """Simulate the runs and print a table of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole, number = {"type": positive}, {"type": float}
    parser.add_argument("--prompts", **whole, default=64, help="prompts per step")
    parser.add_argument("--samples", **whole, default=8, help="samples per prompt")
    parser.add_argument("--engines", **whole, default=1)
    parser.add_argument("--slots", **whole, default=512, help="concurrent episodes per engine")
    parser.add_argument("--median", **number, default=30.0, help="median seconds per episode")
    parser.add_argument(
        "--sigma",
        **number,
        default=1.0,
        help="spread; with 1, the slowest 1 %% take ten times the median",
    )
    parser.add_argument("--train", **number, default=20.0, help="seconds per update")
    parser.add_argument("--publish", **number, default=1.0, help="seconds per publication")
    parser.add_argument("--queues", **whole, nargs="+", default=[1, 2, 4])
    parser.add_argument("--staleness", **whole, help="in versions; default: the queue length")
    parser.add_argument("--steps", **whole, default=50)
    given = parser.parse_args()
    work = Workload(
        prompts=given.prompts,
        samples=given.samples,
        slots=given.engines * given.slots,
        median=given.median,
        sigma=given.sigma,
        train=given.train,
        publish=given.publish,
        steps=given.steps,
    )
    table = Table("", "s per step", "speed-up", "engines idle", "trainer idle", "age")
    for row in rows(work, given.queues, given.staleness):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
