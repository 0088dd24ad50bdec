"""The asynchronous source on echoes: steps that leave the weights as they were, what a checkpoint has, and a smaller limit after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.rollout import RolloutConfig
from openrlhf.observability.metrics import values
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.generator import Group, Request
from openrlhf.trainers.async_source import AsyncSource
from openrlhf.trajectory import Prompt, Trajectory
from tests.trainers.test_sources import SPEC, EchoGenerator, Prompts

PROMPTS, BATCH = 24, 2


class VersionedEcho(EchoGenerator):
    """Answers with the version that the engines have."""

    version = 0

    async def stream(
        self, prompts: Iterable[Prompt], request: Request, *, groups: int, at_once: int | None = None
    ) -> AsyncIterator[Group]:
        for prompt in islice(prompts, groups):
            yield [self.answer(prompt)]

    def answer(self, prompt: Prompt) -> Trajectory:
        return replace(super().answer(prompt), weight_versions=(self.version,))


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    with closing(BackgroundLoop()) as running:
        yield running


def source(loop: BackgroundLoop, engines: VersionedEcho, *, queue: int, staleness: int) -> AsyncSource:
    train = RLTrainConfig(
        async_enable=True,
        async_queue_size=queue,
        max_staleness=staleness,
        partial_rollout_enable=True,
        step_timeout=5.0,
    )
    spec = replace(SPEC, rollout=RolloutConfig(max_new_tokens=4, batch_size=BATCH))
    rows: Any = Prompts(PROMPTS)
    return AsyncSource(rows, engines, loop, spec, RLFlags(train=train))


def publish(made: AsyncSource, engines: VersionedEcho, version: int) -> None:
    with made.publishing(version):
        engines.version = version


@pytest.mark.parametrize("frozen", [range(0), range(1, 6), range(4, 6), range(3, 4)])
@pytest.mark.parametrize("queue", [1, 2, 4])
def test_steps_that_publish_nothing_neither_stop_the_run_nor_age_the_samples(
    loop: BackgroundLoop, queue: int, frozen: range
) -> None:
    engines = VersionedEcho()
    made = source(loop, engines, queue=queue, staleness=queue)
    trained: list[int] = []
    for step, batch in enumerate(made, 1):
        trained += [t.prompt.index for t in batch]
        assert values(made.metrics())["rollout/lag_max"] <= queue
        if step not in frozen:
            publish(made, engines, step)
    assert sorted(trained) == list(range(PROMPTS)) and made.step == PROMPTS // BATCH


def test_a_checkpoint_can_be_continued_with_a_smaller_limit(loop: BackgroundLoop, tmp_path: Path) -> None:
    engines = VersionedEcho()
    first = source(loop, engines, queue=4, staleness=4)
    steps = iter(first)
    before = [t.prompt.index for _ in range(3) for t in [*next(steps)]]
    first.save(tmp_path)
    second = source(loop, engines, queue=1, staleness=1)
    second.resume(step=first.step, consumed=first.consumed, folder=tmp_path)
    assert second.held and all(each.finished for each in second.held)
    after: list[int] = []
    for step, batch in enumerate(second, first.step + 1):
        after += [t.prompt.index for t in batch]
        publish(second, engines, step)
    assert sorted(before + after) == list(range(PROMPTS))
    assert second.step == PROMPTS // BATCH


def test_the_steps_are_counted_where_the_samples_are_taken(loop: BackgroundLoop, tmp_path: Path) -> None:
    """So that a run that is terminated between the two knows that it cannot save: the samples are neither here nor there."""
    made = source(loop, VersionedEcho(), queue=2, staleness=2)
    while (taken := loop.run(made._progress(), 5.0)) is None:
        pass
    assert (made.step, len(taken)) == (1, BATCH)
