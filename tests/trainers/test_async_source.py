"""Tests for the asynchronous source, with an engine that echoes prompts.

The tests cover weight versions, checkpoint contents, and when prompts start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from openrlhf import termination
from openrlhf.config.algorithm import AlgoConfig
from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.data.batching import permutation
from openrlhf.observability.metrics import values
from openrlhf.rewards.budget import RewardErrors
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from openrlhf.rollout.background import BackgroundLoop, RolloutError
from openrlhf.rollout.generator import (
    Generate,
    Generator,
    Group,
    Request,
    RolloutGenerator,
    SamplingSpec,
)
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trainers.async_source import AsyncSource
from tests.rollout.test_generator import Decoder, Engines
from tests.trainers.episodes import episode, failed
from tests.trainers.test_sources import SPEC, EchoGenerator, Prompts

PROMPTS, BATCH = 24, 2


class VersionedEcho(EchoGenerator):
    """A generator whose answers are tagged with the engines' current weight version."""

    version = 0

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
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
    """A generator for which some prompts are rejected and some fail.

    The filter rejects the prompts in `rejected`, prompts numbered `broken_from` or higher fail, and
    only `most` prompts are answered.
    """

    def __init__(
        self, rejected: Collection[int] = (), *, broken_from: int = 1000, most: int = 1000
    ) -> None:
        super().__init__()
        self.rejected, self.broken_from, self.most, self.answered = rejected, broken_from, most, 0

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncIterator[Group]:
        while self.answered >= self.most:
            await asyncio.sleep(0.001)
        async for group in super().stream(prompts, request, groups=groups):
            self.answered += 1
            yield await request.on_group(group)

    def answer(self, prompt: Prompt) -> Trajectory:
        if prompt.index >= self.broken_from:
            return failed(prompt.index)
        return replace(super().answer(prompt), score=1.0 if prompt.index in self.rejected else 0.5)


def source(
    loop: BackgroundLoop,
    engines: Generator,
    *,
    queue: int,
    staleness: int,
    max_error_rate: float = 0.1,
    partial: bool = True,
) -> AsyncSource:
    train = RLTrainConfig(
        async_enable=True,
        async_queue_size=queue,
        max_staleness=staleness,
        partial_rollout_enable=partial,
        step_timeout=60.0,
    )
    spec = replace(SPEC, rollout=RolloutConfig(max_new_tokens=4, batch_size=BATCH))
    rows: Any = Prompts(PROMPTS)
    algo = AlgoConfig(dynamic_filtering_enable=isinstance(engines, Judged))
    config = RLFlags(
        train=train,
        algo=algo,
        reward=RewardConfig(max_error_rate=max_error_rate),
        rollout=spec.rollout,
    )
    return AsyncSource(rows, engines, loop, spec, config)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def publish(made: AsyncSource, engines: VersionedEcho, version: int) -> None:
    with made.publishing(version):
        engines.version = version


@pytest.mark.parametrize("frozen", [range(0), range(1, 6), range(4, 6), range(3, 4)])
@pytest.mark.parametrize("queue", [1, 2, 4])
def test_steps_without_publication_neither_stop_the_run_nor_age_samples(
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


def test_run_can_resume_with_smaller_queue_and_staleness_limits(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
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


def test_lag_after_resume_does_not_count_steps_that_published_nothing(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    engines = VersionedEcho()
    whole = source(loop, engines, queue=4, staleness=4)
    steps = iter(whole)
    for _ in range(3):
        next(steps)
    publish(whole, engines, 3)  # steps 1 and 2 did not change the weights
    whole.metrics()
    whole.save(tmp_path)
    resumed = source(loop, engines, queue=4, staleness=4)
    resumed.resume(step=3, consumed=whole.consumed, folder=tmp_path)
    next(steps)
    next(iter(resumed))
    expected = values(whole.metrics())
    assert expected["rollout/lag_max"] == 1
    assert values(resumed.metrics()) == expected


def test_step_is_counted_as_soon_as_its_samples_are_taken(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    """The step count reveals that samples have left the source but not reached the training loop.

    If a run ends before the training loop receives the samples, the samples cannot be saved.
    """
    made = source(loop, VersionedEcho(), queue=2, staleness=2)
    while (taken := loop.run(made._progress(), 5.0, doing="finish")) is None:
        pass
    assert (made.step, len(taken)) == (1, BATCH)


def test_resume_permutes_rows_once_per_epoch_for_any_number_of_held_prompts(
    loop: BackgroundLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = source(loop, VersionedEcho(), queue=8, staleness=8)
    next(iter(first))
    first.save(tmp_path)
    permuted: list[int] = []
    randperm = torch.randperm

    def counted(rows: int, **options: Any) -> torch.Tensor:
        permuted.append(rows)
        return randperm(rows, **options)

    permutation.cache_clear()
    monkeypatch.setattr(torch, "randperm", counted)
    second = source(loop, VersionedEcho(), queue=8, staleness=8)
    second.resume(step=first.step, consumed=first.consumed, folder=tmp_path)
    assert len(second.held) > 8 and permuted == [PROMPTS]
    assert [each.prompt.text for each in second.held] == [each.prompt.text for each in first.held]


# ---- publications


class SlowEngines(Engines):
    """Engines whose samples finish when `drawn` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = asyncio.Event()

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        await self.drawn.wait()
        return [replace(each, tokens=[5]) for each in await super().generate(key, tokens, params)]


class SlowReward:
    """A reward function that returns 1 when `scored` is set."""

    extra_fields = ()

    def __init__(self) -> None:
        self.scored = asyncio.Event()
        self.waiting = 0

    async def check(self) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        self.waiting += 1
        await self.scored.wait()
        return [RewardResult(reward=1.0)] * len(requests)


class OwnRewards:
    """An agent that samples once and then scores the sample slowly."""

    def __init__(self, reward: SlowReward) -> None:
        self.reward = reward

    async def play(self, prompt: Prompt, spec: SamplingSpec, generate: Generate) -> Group:
        await generate(prompt, spec, prompt.tokens, spec.agent_params_for(prompt))
        await self.reward.score([])
        return [episode(prompt.index, score=1.0)]


Rewarded = tuple[AsyncSource, SlowEngines, SlowReward]


@pytest.fixture
def rewarded(loop: BackgroundLoop) -> Iterator[Callable[..., Rewarded]]:
    """Return a source whose samples and rewards wait for test events; partial rollouts are off."""
    made: list[AsyncSource] = []

    def make(*, agents: bool = False) -> Rewarded:
        engines, reward, tokenizer = SlowEngines(), SlowReward(), Decoder()
        played: Any = OwnRewards(reward) if agents else None
        generator = RolloutGenerator(
            engines, cast(Any, tokenizer), cast(Any, reward), agents=played
        )
        made.append(source(loop, generator, queue=1, staleness=1, partial=False))
        loop.run(start(made[0]), 5.0, doing="finish")
        return made[0], engines, reward

    yield make
    for each in made:
        each.close()


async def start(made: AsyncSource) -> None:
    """Start generating responses for the first prompts, as the loop's first request does."""
    made._start()
    await asyncio.sleep(0)


def is_published(made: AsyncSource, within: float) -> bool:
    """Return whether a publication completes within `within` seconds."""
    publication = threading.Thread(target=publish, args=(made, VersionedEcho(), 1), daemon=True)
    publication.start()
    publication.join(within)
    return not publication.is_alive()


def test_publication_waits_for_the_last_token_but_not_for_the_reward(
    loop: BackgroundLoop, rewarded: Callable[..., Rewarded]
) -> None:
    made, engines, reward = rewarded()
    assert not is_published(made, within=0.1)
    loop.run(set_event(engines.drawn), 5.0, doing="finish")
    wait_until(lambda: made.version == 1)
    assert reward.waiting == BATCH and not any(each.finished for each in made.held)
    # The versions are those of the weights that generated each sample.
    assert [each.version for each in made.held] == [0, 0]
    loop.run(set_event(reward.scored), 5.0, doing="finish")
    assert [t.prompt.index for t in next(iter(made))] == [0, 1]
    assert values(made.metrics())["rollout/lag_max"] == 1


def test_publication_that_waits_too_long_names_the_samples_in_progress(
    rewarded: Callable[..., Rewarded],
) -> None:
    made, _, _ = rewarded()
    made.train = replace(made.train, step_timeout=0.2)
    message = r"samples in progress.*publication.* 0\.2 s.*--train\.step_timeout"
    with pytest.raises(RolloutError, match=message), made.publishing(1):
        pass


def test_publication_waits_for_an_agent_that_may_sample_again(
    loop: BackgroundLoop, rewarded: Callable[..., Rewarded]
) -> None:
    made, engines, reward = rewarded(agents=True)
    loop.run(set_event(engines.drawn), 5.0, doing="finish")
    wait_until(lambda: reward.waiting == BATCH)
    assert not is_published(made, within=0.1)
    loop.run(set_event(reward.scored), 5.0, doing="finish")
    wait_until(lambda: made.version == 1)


def test_terminated_process_does_not_wait_for_samples_before_publishing(
    rewarded: Callable[..., Rewarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = rewarded()
    monkeypatch.setattr(termination, "asked", lambda: 143)
    with made.publishing(1) as is_quiet:
        assert not is_quiet
    assert made.version == 0 and made.consumed == BATCH


async def set_event(event: asyncio.Event) -> None:
    event.set()


# ---- filtering


def test_reward_that_always_fails_does_not_use_up_the_prompts(loop: BackgroundLoop) -> None:
    made = source(loop, Judged(broken_from=0), queue=2, staleness=2)
    batch = next(iter(made))
    with pytest.raises(RewardErrors):
        made.errors.check(batch)
    assert made.consumed <= 8  # twice the limit on prompts in progress


def test_reward_that_starts_failing_during_a_step_does_not_use_up_the_prompts(
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


def test_prompts_whose_samples_all_failed_are_drawn_again_after_resume(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    """The reward function works again after the resume."""
    engines = Judged(broken_from=2, most=2)
    first = source(loop, engines, queue=2, staleness=2)
    before = [t.prompt.index for t in next(iter(first))]
    engines.most = 1000
    wait_until(
        lambda: (
            any(each.failed for each in first.held) and all(each.finished for each in first.held)
        )
    )
    first.save(tmp_path)
    second = source(loop, Judged(), queue=2, staleness=2)
    second.resume(step=first.step, consumed=first.consumed, folder=tmp_path)
    after = list(second)
    assert not any(t.failed for batch in after for t in batch)
    assert sorted([*before, *(t.prompt.index for batch in after for t in batch)]) == list(
        range(PROMPTS)
    )


def test_failures_within_the_error_budget_do_not_end_the_run(loop: BackgroundLoop) -> None:
    made = source(loop, Judged(broken_from=4), queue=2, staleness=2, max_error_rate=1.0)
    assert sorted(t.prompt.index for batch in made for t in batch) == list(range(PROMPTS))


def test_rejected_prompts_are_replaced_while_a_step_trains(loop: BackgroundLoop) -> None:
    """Without a request from the loop, prompts are replaced until a full batch is waiting."""
    made = source(loop, Judged(range(2, 20)), queue=1, staleness=1)
    steps = iter(made)
    assert [t.prompt.index for t in next(steps)] == [0, 1]
    wait_until(lambda: made.consumed == 22)
    assert [t.prompt.index for t in next(steps) if not t.filtered] == [20, 21]


def test_prompts_started_after_the_checkpoint_start_again_after_resume(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    engines = Judged(range(2, 6), most=2)
    first = source(loop, engines, queue=1, staleness=1)
    before = [t.prompt.index for t in next(iter(first))]
    first.save(tmp_path)
    engines.most = 1000
    wait_until(lambda: first.consumed == 8)  # the run state may count more prompts than the file
    second = source(loop, engines, queue=1, staleness=1)
    second.resume(step=first.step, consumed=first.consumed, folder=tmp_path)
    after = [t.prompt.index for batch in second for t in batch]
    assert sorted(before + after) == list(range(PROMPTS))


@pytest.mark.parametrize("turns", range(5))
def test_engine_failure_right_after_another_prompt_finished_is_raised_immediately(
    loop: BackgroundLoop, turns: int
) -> None:
    """The prompt that failed is not started again."""
    started: list[int] = []

    class Failing(VersionedEcho):
        async def stream(
            self,
            prompts: Iterable[Prompt],
            request: Request,
            *,
            groups: int,
            at_once: int | None = None,
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
