"""The asynchronous source on echoes: what counts as a version, what a checkpoint has, and when prompts start and when not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.learning import AlgoConfig, RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.observability.metrics import values
from openrlhf.rewards.budget import RewardErrors
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.generator import Group, Request
from openrlhf.trainers.async_source import AsyncSource
from openrlhf.trajectory import Prompt, Trajectory
from tests.trainers.episodes import failed
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


class Judged(VersionedEcho):
    """Answers of some prompts teach nothing, those from some prompt on fail, and only so many prompts are answered."""

    def __init__(self, rejected: Collection[int] = (), *, broken_from: int = 1000, most: int = 1000) -> None:
        super().__init__()
        self.rejected, self.broken_from, self.most, self.answered = rejected, broken_from, most, 0

    async def stream(
        self, prompts: Iterable[Prompt], request: Request, *, groups: int, at_once: int | None = None
    ) -> AsyncIterator[Group]:
        while self.answered >= self.most:
            await asyncio.sleep(0.001)
        async for group in super().stream(prompts, request, groups=groups):
            self.answered += 1
            yield await request.annotated(group)

    def answer(self, prompt: Prompt) -> Trajectory:
        if prompt.index >= self.broken_from:
            return failed(prompt.index)
        return replace(super().answer(prompt), score=1.0 if prompt.index in self.rejected else 0.5)


def source(
    loop: BackgroundLoop, engines: VersionedEcho, *, queue: int, staleness: int, max_error_rate: float = 0.1
) -> AsyncSource:
    train = RLTrainConfig(
        async_enable=True,
        async_queue_size=queue,
        max_staleness=staleness,
        partial_rollout_enable=True,
        step_timeout=5.0,
    )
    spec = replace(SPEC, rollout=RolloutConfig(max_new_tokens=4, batch_size=BATCH))
    rows: Any = Prompts(PROMPTS)
    algo = AlgoConfig(dynamic_filtering_enable=isinstance(engines, Judged))
    config = RLFlags(train=train, algo=algo, reward=RewardConfig(max_error_rate=max_error_rate), rollout=spec.rollout)
    return AsyncSource(rows, engines, loop, spec, config)


def wait_until(true: Callable[[], bool]) -> None:
    """Return when something has happened in the event loop."""
    deadline = time.monotonic() + 5.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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


# ---- filtering


def test_a_reward_that_always_fails_does_not_use_up_the_prompts(loop: BackgroundLoop) -> None:
    made = source(loop, Judged(broken_from=0), queue=2, staleness=2)
    batch = next(iter(made))
    with pytest.raises(RewardErrors):
        made.errors.check(batch)
    assert made.consumed <= 8  # twice what may be under way


def test_a_reward_that_begins_to_fail_while_a_step_trains_does_not_use_up_the_prompts_either(
    loop: BackgroundLoop,
) -> None:
    engines = Judged(broken_from=2, most=2)
    made = source(loop, engines, queue=2, staleness=2)
    steps = iter(made)
    made.errors.check(next(steps))
    engines.most = 1000
    wait_until(lambda: all(each.finished for each in made.held))
    assert made.consumed == 6
    with pytest.raises(RewardErrors):
        made.errors.check(next(steps))


def test_prompts_whose_samples_all_failed_are_drawn_again_after_a_resume(loop: BackgroundLoop, tmp_path: Path) -> None:
    """With the reward repaired meanwhile, the run goes on."""
    engines = Judged(broken_from=2, most=2)
    first = source(loop, engines, queue=2, staleness=2)
    before = [t.prompt.index for t in next(iter(first))]
    engines.most = 1000
    wait_until(lambda: any(each.failed for each in first.held) and all(each.finished for each in first.held))
    first.save(tmp_path)
    second = source(loop, Judged(), queue=2, staleness=2)
    second.resume(step=first.step, consumed=first.consumed, folder=tmp_path)
    after = list(second)
    assert not any(t.failed for batch in after for t in batch)
    assert sorted([*before, *(t.prompt.index for batch in after for t in batch)]) == list(range(PROMPTS))


def test_failures_that_the_budget_allows_end_nothing(loop: BackgroundLoop) -> None:
    made = source(loop, Judged(broken_from=4), queue=2, staleness=2, max_error_rate=1.0)
    assert sorted(t.prompt.index for batch in made for t in batch) == list(range(PROMPTS))


def test_rejected_prompts_are_replaced_while_a_step_trains(loop: BackgroundLoop) -> None:
    """Until a batch that is kept waits, without a question from the loop."""
    made = source(loop, Judged(range(2, 20)), queue=1, staleness=1)
    steps = iter(made)
    assert [t.prompt.index for t in next(steps)] == [0, 1]
    wait_until(lambda: made.consumed == 22)
    assert [t.prompt.index for t in next(steps) if not t.filtered] == [20, 21]


def test_prompts_that_start_after_a_checkpoint_was_written_start_again_after_a_resume(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    engines = Judged(range(2, 6), most=2)
    first = source(loop, engines, queue=1, staleness=1)
    before = [t.prompt.index for t in next(iter(first))]
    first.save(tmp_path)
    engines.most = 1000
    wait_until(lambda: first.consumed == 8)  # when the loop asks for the number, it has grown
    second = source(loop, engines, queue=1, staleness=1)
    second.resume(step=first.step, consumed=first.consumed, folder=tmp_path)
    after = [t.prompt.index for batch in second for t in batch]
    assert sorted(before + after) == list(range(PROMPTS))


@pytest.mark.parametrize("turns", range(5))
def test_an_engine_that_fails_just_after_another_prompt_has_finished_is_noticed_at_once(
    loop: BackgroundLoop, turns: int
) -> None:
    """The prompt that failed is not started again."""
    started: list[int] = []

    class Failing(VersionedEcho):
        async def stream(
            self, prompts: Iterable[Prompt], request: Request, *, groups: int, at_once: int | None = None
        ) -> AsyncIterator[Group]:
            for prompt in islice(prompts, groups):
                started.append(prompt.index)
                for _ in range(prompt.index * turns):
                    await asyncio.sleep(0)
                if prompt.index == 1:
                    raise ArithmeticError("the engine failed")
                yield [self.answer(prompt)]

    with pytest.raises(ArithmeticError):
        next(iter(source(loop, Failing(), queue=1, staleness=1)))
    assert started == [0, 1]
