"""Tests for dynamic filtering: each step's prompts, the number of draws, and no lost prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from openrlhf.config.algorithm import AlgoConfig
from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.observability.metrics import Metric, values
from openrlhf.observability.run_folder import sample_row
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.generator import Group, RolloutGenerator, SamplingSpec, unchanged
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trainers.filtering import DynamicFilter, pass_rate, thrown_away
from openrlhf.trainers.sources import SyncSource
from tests.trainers.episodes import episode, failed

SPEC = SamplingSpec(
    purpose="train",
    rollout=RolloutConfig(n_samples_per_prompt=2, max_new_tokens=4),
    max_len=8,
    seed=0,
)
# Rewards of a prompt's two samples. None means that the reward call fails.
GOOD, EASY, HARD, BROKEN, HALF_BROKEN = (
    (0.0, 1.0),
    (1.0, 1.0),
    (0.0, 0.0),
    (None, None),
    (None, 0.5),
)
Scores = tuple[float | None, float | None]
LOOP = BackgroundLoop()


def between_zero_and_one() -> DynamicFilter:
    return DynamicFilter(low=0.0, high=1.0)


# ---- one prompt


@pytest.mark.parametrize(
    ("group", "rejected"),
    [
        ([episode(0, 0, score=0.0), episode(0, 1, score=1.0)], False),
        ([episode(0, 0, score=1.0), episode(0, 1, score=1.0)], True),
        ([episode(0, 0, score=0.0), episode(0, 1, score=0.0)], True),
        ([episode(0, 0, score=0.5), failed(0, 1)], False),
        ([episode(0, 0, score=1.0), failed(0, 1)], True),
        ([failed(0, 0), failed(0, 1)], True),
    ],
    ids=["between", "the upper end", "the lower end", "finished ones", "of them", "none finished"],
)
def test_prompt_is_kept_if_the_mean_score_of_its_finished_samples_is_in_range(
    group: list[Trajectory], rejected: bool
) -> None:
    assert between_zero_and_one().rejects(group) == rejected


def test_filter_uses_the_score_instead_of_the_reward() -> None:
    group = [episode(0, i, score=float(i), reward=7.0) for i in range(2)]
    assert not between_zero_and_one().rejects(group)


def test_filtered_episode_keeps_its_text_and_numbers_but_drops_its_tokens() -> None:
    before = episode(3, 1, score=1.0, actions=5, response_text="yes")
    after = thrown_away(before)
    assert (after.filtered, after.tokens, after.num_actions) == (True, [], 0)
    assert sample_row(1, after) == sample_row(1, before) | {"filtered": True}


def test_pass_rate_counts_prompts_instead_of_samples() -> None:
    kept = [episode(0, 0, score=0.0), episode(0, 1, score=1.0)]
    filtered = [thrown_away(episode(i, s, score=1.0)) for i in (1, 2, 3) for s in (0, 1)]
    assert values({"rate": pass_rate([*kept, *filtered])}) == {"rate": 25.0}


# ---- runs with the real generator and hand-written engines and rewards


class Prompts(Dataset[Prompt]):
    """Prompt rows named after their row numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index=index, text=f"row {index}", tokens=[index])


class Engines:
    """Engines whose answers take a random number of event-loop iterations."""

    def __init__(self, seed: int) -> None:
        self.delays = random.Random(seed)

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        for _ in range(self.delays.randrange(8)):
            await asyncio.sleep(0)
        return [
            Generation(
                tokens=[1],
                logprobs=[-0.5],
                weight_versions=(0,),
                finish_reason="stop",
                stop_reason=None,
            )
            for _ in params
        ]

    async def rest(self) -> None:
        pass

    def metrics(self) -> dict[str, Metric]:
        return {}


class Decoder:
    """A fake tokenizer with only the methods that these tests need."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(tokens)


class Table:
    """Rewards by dataset row, given either by a reward function or later by a reward model."""

    extra_fields = ()

    def __init__(self, rows: Sequence[Scores]) -> None:
        self.rows = {f"row {number}": scores for number, scores in enumerate(rows)}

    async def check(self) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        scores = self.rows[requests[0].prompt]
        return [RewardResult(reward=s, error="it broke" if s is None else None) for s in scores]

    async def scored(self, group: Group) -> Group:
        """Score a group as a reward model would. Scoring never fails: both scores are set."""
        return [replace(t, score=self.rows[t.prompt.text][t.sample_index]) for t in group]


def steps_of(
    rows: Sequence[Scores],
    *,
    batch_size: int = 2,
    at_once: int | None = None,
    epochs: int = 1,
    consumed: int = 0,
    by_model: bool = False,
    delays: int = 0,
    max_error_rate: float = 1.0,
) -> Iterator[tuple[list[Trajectory], int]]:
    """Yield, for each step, its samples and the number of prompts drawn so far."""
    table = Table(rows)
    rollout = replace(
        SPEC.rollout, batch_size=batch_size, vllm_generate_batch_size=at_once or batch_size
    )
    generator = RolloutGenerator(
        Engines(delays),
        Decoder(),  # pyright: ignore[reportArgumentType]
        None if by_model else table,
    )
    source = SyncSource(
        Prompts(len(rows)),  # pyright: ignore[reportArgumentType]
        generator,
        LOOP,
        replace(SPEC, rollout=rollout),
        RLFlags(
            train=RLTrainConfig(num_episodes=epochs, seed=0, step_timeout=60.0),
            reward=RewardConfig(max_error_rate=max_error_rate),
            algo=AlgoConfig(dynamic_filtering_enable=True),
        ),
        score_group=table.scored if by_model else unchanged,
    )
    source.resume(step=0, consumed=consumed, folder=Path())
    for step in source:
        yield step, source.consumed
    assert source.exhausted


def groups(step: Sequence[Trajectory]) -> list[tuple[int, bool]]:
    """Return each prompt's index and whether it was kept."""
    return [
        (index, not next(group).filtered)
        for index, group in groupby(step, key=lambda t: t.prompt.index)
    ]


def in_order(rows: Sequence[Scores]) -> list[Scores]:
    """Return the rows arranged so that a single epoch draws them in the given order."""
    order = [step[0].prompt.text for step, _ in steps_of([GOOD] * len(rows), batch_size=1)]
    placed = dict(zip(order, rows, strict=True))
    return [placed[f"row {number}"] for number in range(len(rows))]


@pytest.mark.parametrize(
    "by_model", [False, True], ids=["the rule's scores", "a reward model's scores"]
)
def test_prompts_outside_the_range_are_replaced_by_the_next_in_order(
    by_model: bool,
) -> None:
    rows = in_order([GOOD, EASY, HARD, GOOD, GOOD, GOOD, EASY, GOOD, HARD])
    steps = list(steps_of(rows, by_model=by_model))
    assert [groups(step) for step, _ in steps] == [
        [(0, True), (1, False), (2, False), (3, True)],
        [(4, True), (5, True)],
        [(6, False), (7, True), (8, False)],  # a smaller step, because the prompts are used up
    ]
    assert [drawn for _, drawn in steps] == [4, 6, 9]


def test_every_epoch_may_end_with_a_smaller_step() -> None:
    steps = [groups(step) for step, _ in steps_of([GOOD] * 3, epochs=2)]
    assert steps == [[(0, True), (1, True)], [(2, True)], [(3, True), (4, True)], [(5, True)]]


def test_rejected_prompts_at_the_end_of_an_epoch_are_yielded_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = [step for step, _ in steps_of(in_order([GOOD, GOOD, EASY, HARD]))]
    assert [groups(step) for step in steps] == [[(0, True), (1, True)], [(2, False), (3, False)]]
    warning = capsys.readouterr().err
    assert "The last 2 prompts of an epoch were all rejected" in warning
    assert "between 0 and 1 (--algo.dynamic_filtering_range)" in warning


def test_run_ends_if_every_prompt_is_rejected() -> None:
    steps = [step for step, _ in steps_of([EASY] * 5, epochs=3)]
    assert [len(groups(step)) for step in steps] == [5, 5, 5]
    assert all(t.filtered for step in steps for t in step)


def test_prompts_whose_samples_all_failed_are_replaced_and_still_count_as_failed() -> None:
    ((step, _),) = steps_of(in_order([BROKEN, HALF_BROKEN, GOOD]))
    assert groups(step) == [(0, False), (1, True), (2, True)]
    assert [t.failed for t in step] == [True, True, True, False, False, False]


def test_reward_that_always_fails_does_not_use_up_the_prompts() -> None:
    _, drawn = next(steps_of([BROKEN] * 50, max_error_rate=0.1))
    assert drawn <= 4


ROWS = st.lists(st.sampled_from([GOOD, EASY, HARD, BROKEN, HALF_BROKEN]), min_size=1, max_size=12)


@given(
    rows=ROWS,
    batch_size=st.integers(1, 4),
    epochs=st.integers(1, 3),
    delays=st.integers(0, 1000),
    by_model=st.booleans(),
    data=st.data(),
)
def test_no_kept_prompt_is_lost_and_no_unneeded_prompt_is_drawn(
    rows: list[Scores],
    batch_size: int,
    epochs: int,
    delays: int,
    by_model: bool,
    data: st.DataObject,
) -> None:
    """The result does not depend on the order in which samples finish.

    A run resumed after any step continues like an uninterrupted run.
    """
    if by_model:
        rows = [scores if None not in scores else GOOD for scores in rows]
    run = {"batch_size": batch_size, "epochs": epochs, "by_model": by_model}
    steps = list(steps_of(rows, delays=delays, **run))
    tried = [t for step, _ in steps for t in step]
    assert [(t.prompt.index, t.sample_index) for t in tried] == [
        (index, sample) for index in range(len(rows) * epochs) for sample in range(2)
    ]
    for t in tried:
        assert t.filtered == (
            rows[int(t.prompt.text.removeprefix("row "))] not in (GOOD, HALF_BROKEN)
        )
    for step, drawn in steps:
        kept = [stays for _, stays in groups(step)]
        if sum(kept) == batch_size:
            assert kept[-1]  # the step ends with the prompt that completes its batch
        else:
            assert sum(kept) < batch_size and drawn % len(rows) == 0  # an epoch ended
        assert drawn == step[-1].prompt.index + 1
    done = data.draw(st.integers(0, len(steps)), label="steps done")
    consumed = steps[done - 1][1] if done else 0
    assert list(steps_of(rows, consumed=consumed, delays=delays + 7, **run)) == steps[done:]


@given(
    rows=ROWS,
    batch_size=st.integers(1, 4),
    more=st.integers(1, 6),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_groups_generated_ahead_are_used_in_later_steps_and_none_is_lost(
    rows: list[Scores], batch_size: int, more: int, epochs: int, data: st.DataObject
) -> None:
    """A run resumed after any step regenerates the waiting groups and does not lose any of them."""
    run = {"batch_size": batch_size, "at_once": batch_size + more, "epochs": epochs}
    steps = list(steps_of(rows, **run))
    done = data.draw(st.integers(0, len(steps)), label="steps done")
    resumed = list(steps_of(rows, consumed=steps[done - 1][1] if done else 0, **run))
    for seen in (steps, [*steps[:done], *resumed]):
        assert [index for step, _ in seen for index, _ in groups(step)] == list(
            range(len(rows) * epochs)
        )
        for step, drawn in seen:
            kept = sum(stays for _, stays in groups(step))
            assert kept == batch_size or (kept < batch_size and drawn % len(rows) == 0)
