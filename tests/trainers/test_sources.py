"""Tests for prompt sources and evaluation.

The prompts of a step depend only on the seed and the position in the run. Evaluation counts every
prompt once.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from openrlhf.config.learning import RLDataConfig, RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.episode_metrics import evaluation_metrics
from openrlhf.rollout.generator import Group, Request, SamplingSpec
from openrlhf.trainers.sources import SyncSource, evaluate
from tests.trainers.episodes import episode, failed

Make = Callable[..., SyncSource]
SPEC = SamplingSpec(purpose="train", rollout=RolloutConfig(max_new_tokens=4), max_len=8, seed=0)


class Prompts(Dataset[Prompt]):
    """Prompt rows named after their row numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index=index, text=f"row {index}", tokens=[index], datasource="a")


class EchoGenerator:
    """A generator that answers every prompt with one episode and records its calls."""

    def __init__(self, *, broken: bool = False) -> None:
        self.calls: list[list[Prompt]] = []
        self.requests: list[Request] = []
        self.most: list[int | None] = []
        self.broken = broken
        self.awake = True

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncIterator[Group]:
        asked = list(islice(prompts, groups))
        self.requests.append(request)
        self.most.append(at_once)
        if asked:
            self.calls.append(asked)
        for prompt in reversed(asked):
            yield [failed(prompt.index) if self.broken else self.answer(prompt)]
        await self.rest()

    async def rest(self) -> None:
        self.awake = False

    def answer(self, prompt: Prompt) -> Trajectory:
        return episode(prompt.index, text=prompt.text, score=float(prompt.tokens[0]))

    def metrics(self) -> dict[str, Metric]:
        return {}


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    with closing(BackgroundLoop()) as running:
        yield running


@pytest.fixture
def source(loop: BackgroundLoop) -> Callable[..., SyncSource]:
    def make(
        prompts: int = 10,
        *,
        consumed: int = 0,
        generator: Any = None,
        batch_size: int = 4,
        at_once: int | None = None,
        epochs: int = 2,
        seed: int = 0,
        max_error_rate: float = 1.0,
        num_workers: int = 0,
        **changes: Any,
    ) -> SyncSource:
        rollout = RolloutConfig(
            max_new_tokens=4, batch_size=batch_size, vllm_generate_batch_size=at_once or batch_size
        )
        config = RLFlags(
            train=RLTrainConfig(num_episodes=epochs, seed=seed, step_timeout=60.0),
            reward=RewardConfig(max_error_rate=max_error_rate),
            data=RLDataConfig(dataloader_num_workers=num_workers),
            rollout=rollout,
        )
        rows: Any = Prompts(prompts)
        spec = replace(SPEC, rollout=rollout)
        made = SyncSource(rows, generator or EchoGenerator(), loop, spec, config, **changes)
        made.resume(step=0, consumed=consumed, folder=Path())
        return made

    return make


def drawn(made: SyncSource) -> list[list[tuple[int, str]]]:
    """Return, for each step, the index and text of each prompt."""
    return [[(t.prompt.index, t.prompt.text) for t in step] for step in made]


# ---- drawing prompts


def test_every_prompt_is_drawn_once_per_epoch_and_the_last_batch_may_be_smaller(
    source: Make,
) -> None:
    made = source()
    steps = drawn(made)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    assert len(steps) == made.total_steps
    texts = [text for step in steps for _, text in step]
    for one_pass in (texts[:10], texts[10:]):
        assert sorted(one_pass) == sorted(f"row {i}" for i in range(10))


def test_prompts_are_numbered_consecutively_across_epochs(source: Make) -> None:
    numbers = [index for step in drawn(source()) for index, _ in step]
    assert numbers == list(range(20))


def test_epochs_are_shuffled_differently_and_depend_on_the_seed(source: Make) -> None:
    texts = [text for step in drawn(source()) for _, text in step]
    assert texts[:10] != texts[10:]
    assert drawn(source()) == drawn(source())
    assert drawn(source(seed=1)) != drawn(source())


@pytest.mark.parametrize("steps_done", range(7))
def test_resumed_run_draws_the_remaining_prompts(source: Make, steps_done: int) -> None:
    whole = drawn(source())
    consumed = sum(len(step) for step in whole[:steps_done])
    assert drawn(source(consumed=consumed)) == whole[steps_done:]


def test_consumed_counts_the_prompts_of_yielded_steps(source: Make) -> None:
    made = source()
    for _ in islice(made, 4):
        pass
    assert (made.consumed, made.epoch) == (14, 1)


def test_worker_processes_do_not_change_the_prompt_order(source: Make) -> None:
    assert drawn(source(num_workers=2)) == drawn(source())


def test_step_is_generated_only_on_request(source: Make) -> None:
    made = source()
    generator = made.generator
    assert isinstance(generator, EchoGenerator)
    steps = iter(made)
    assert generator.calls == []
    first = next(steps)
    assert len(generator.calls) == 1
    assert [t.prompt.index for t in first] == [0, 1, 2, 3]
    assert made.consumed == 4


@pytest.mark.parametrize(
    ("prompts", "at_once", "batch_size", "steps_that_generate"),
    [
        (100, 64, 32, [1, 3]),
        (192, 128, 32, [1, 5]),
        (96, 64, 32, [1, 3]),
        (100, 48, 32, [1, 2, 4]),
        (10, 7, 4, [1, 2]),
        (3, 9, 2, [1]),
    ],
)
def test_prompts_generated_ahead_are_used_once_and_only_in_their_own_epoch(
    source: Make, prompts: int, at_once: int, batch_size: int, steps_that_generate: list[int]
) -> None:
    made = source(prompts, batch_size=batch_size, at_once=at_once)
    generator, when = made.generator, []
    assert isinstance(generator, EchoGenerator)
    steps = []
    for step in made:
        steps.append([t.prompt.index for t in step])
        when += [len(steps)] * (len(generator.calls) - len(when))
    assert [index for step in steps for index in step] == list(range(2 * prompts))
    assert len(steps) == made.total_steps
    assert all(len(step) == batch_size for step in steps if (step[-1] + 1) % prompts)
    assert all(len(call) <= at_once for call in generator.calls)
    assert when == [*steps_that_generate, *(len(steps) // 2 + step for step in steps_that_generate)]


@pytest.mark.parametrize(("at_once", "handed_out"), [(4, 1), (8, 4)])
def test_batch_that_is_bound_to_fail_is_aborted_early_if_it_has_a_single_step(
    source: Make, at_once: int, handed_out: int
) -> None:
    """If the batch had several steps, the cancelled prompts would be missing from the epoch."""
    made = source(at_once=at_once, generator=EchoGenerator(broken=True), max_error_rate=0.1)
    assert len(next(iter(made))) == handed_out


def test_requests_carry_the_step_number(source: Make) -> None:
    made = source(at_once=8)
    made.resume(step=5, consumed=0, folder=Path())
    for _ in made:
        pass
    assert [request.step for request in made.generator.requests] == [
        6,
        8,
        9,
        9,
        11,
    ]  # the first 9 belongs to the first epoch's last request


def test_source_is_exhausted_after_the_generators_last_step(source: Make) -> None:
    made = source(last_step=2)
    assert len(drawn(made)) == 2
    assert made.exhausted and made.epoch == 0


@pytest.mark.parametrize("steps_done", range(7))
def test_resumed_run_draws_prompts_that_were_generated_ahead_again(
    source: Make, steps_done: int
) -> None:
    whole = drawn(source(at_once=8))
    made = source(at_once=8)
    for _ in islice(made, steps_done):
        pass
    assert made.consumed == sum(len(step) for step in whole[:steps_done])
    assert drawn(source(at_once=8, consumed=made.consumed)) == whole[steps_done:]


def test_evaluation_requests_every_prompt_once_in_limited_batches(loop: BackgroundLoop) -> None:
    generator, prompts = EchoGenerator(), Prompts(5)
    spec = replace(SPEC, rollout=replace(SPEC.rollout, batch_size=2))
    trajectories = evaluate(prompts, generator, loop, spec, step=7, timeout_s=60)  # pyright: ignore[reportArgumentType]
    assert [[p.index for p in call] for call in generator.calls] == [[0, 1, 2, 3, 4]]
    assert (generator.most, [request.step for request in generator.requests]) == ([2], [7])
    assert [t.score for t in trajectories] == [0.0, 1.0, 2.0, 3.0, 4.0]


# ---- evaluation metrics


def test_pass_at_k_is_the_best_score_and_pass_at_1_is_the_mean_score() -> None:
    trajectories = [
        episode(0, 0, score=1.0, actions=2),
        episode(0, 1, score=0.0, actions=4, stop=StopReason.LENGTH),
        episode(1, 0, score=0.0, actions=3),
        episode(1, 1, score=0.0, actions=3),
    ]
    assert evaluation_metrics(trajectories, k=2) == {
        "eval/eval_default_pass2": 0.5,
        "eval/eval_default_pass1": 0.25,
        "eval/eval_default_score_stderr": pytest.approx(0.25),  # of the prompt means 0.5 and 0
        "eval/eval_default_reward_mean": 0.25,
        "eval/eval_default_response_length_mean": 3.0,
        "eval/eval_default_truncated_rate": 0.25,
        "eval/eval_response_length_mean": 3.0,
        "eval/eval_truncated_rate": 0.25,
        "eval/eval_num_samples": 4.0,
        "eval/eval_failed_episodes": 0.0,
    }


def test_every_data_source_gets_its_own_metrics() -> None:
    metrics = evaluation_metrics(
        [episode(0, score=1.0, source="gsm8k"), episode(1, score=0.0, source="math")], k=1
    )
    assert metrics["eval/eval_gsm8k_pass1"] == 1.0
    assert metrics["eval/eval_math_pass1"] == 0.0
    assert metrics["eval/eval_num_samples"] == 2.0


def test_single_sample_per_prompt_gives_only_pass_at_1() -> None:
    metrics = evaluation_metrics([episode(0, score=1.0), episode(1, score=0.0)], k=1)
    assert [name for name in metrics if "pass" in name] == ["eval/eval_default_pass1"]
    assert metrics["eval/eval_default_pass1"] == 0.5


def test_failed_samples_are_excluded_and_counted() -> None:
    trajectories = [
        episode(0, 0, score=1.0),
        failed(0, 1),  # prompt 0: 1 of 1 succeeds
        episode(1, 0, score=0.0),
        episode(1, 1, score=0.5),  # prompt 1: mean 0.25
        failed(2, 0),
        failed(2, 1),  # prompt 2: no finished sample
    ]
    metrics = evaluation_metrics(trajectories, k=2)
    assert metrics["eval/eval_default_pass1"] == pytest.approx((1.0 + 0.25) / 2)
    assert metrics["eval/eval_default_pass2"] == pytest.approx((1.0 + 0.5) / 2)
    assert metrics["eval/eval_failed_episodes"] == 3.0
    assert metrics["eval/eval_num_samples"] == 6.0


def test_pass_rates_are_omitted_if_every_sample_failed() -> None:
    metrics = evaluation_metrics([failed(0, 0), failed(0, 1)], k=2)
    assert metrics == {"eval/eval_num_samples": 2.0, "eval/eval_failed_episodes": 2.0}


def test_pass_rate_is_nan_for_a_source_without_scores() -> None:
    metrics = evaluation_metrics([episode(0, score=None)], k=1)
    assert math.isnan(metrics["eval/eval_default_pass1"])


def test_engines_rest_in_every_step_even_if_its_groups_were_generated_in_advance(
    source: Callable[..., SyncSource],
) -> None:
    """A publication after each step wakes the engines."""
    generator = EchoGenerator()
    seen: list[bool] = []
    for _ in source(prompts=8, batch_size=2, at_once=4, epochs=1, generator=generator):
        seen.append(generator.awake)
        generator.awake = True
    assert seen == [False] * 4
    assert len(generator.calls) == 2
