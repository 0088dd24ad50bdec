"""Tests for the assignment of rows to optimizer steps and slices.

A step's rows do not depend on the number of slices, and each row is trained on once per epoch.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.core.batches import Experience, offsets_of
from openrlhf.trainers.update_plan import SliceUpdate, distribute, plan_update
from openrlhf.workers.base import MicroBatchLimits, Update
from openrlhf.workers.critic import CriticWorker

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=25)
PLANS = {"slices": st.integers(1, 5), "batch_size": st.integers(1, 12), "epochs": st.integers(1, 3)}


def batch_of(lengths: list[int]) -> Experience:
    """Return a batch whose row i has group id i. All tokens but a row's first are actions."""
    offsets = offsets_of(lengths)
    tokens = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[offsets[:-1]] = False
    return Experience(
        tokens=tokens,
        offsets=offsets,
        action_mask=mask,
        rollout_logprobs=torch.zeros(len(tokens)),
        group_ids=torch.arange(len(lengths)),
        rewards=torch.zeros(len(lengths)),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def learned(plan: SliceUpdate, lengths: list[int]) -> list[list[int]]:
    """Return, for each optimizer step, the rows with action tokens that a slice trains on."""
    worker = CriticWorker.__new__(CriticWorker)  # a worker without a model
    worker.train_limits = MicroBatchLimits(size=len(lengths))
    job = Update(experience=batch_of(lengths).select(plan.rows), steps=plan.steps)
    steps = []
    for number in range(len(plan.steps)):
        [micro] = worker.window(job, number)
        assert micro.num_rows, "a slice without rows in a step would miss a collective"
        steps.append(sorted(micro.group_ids[micro.num_actions > 0].tolist()))
    return steps


def union(plans: list[SliceUpdate], lengths: list[int]) -> list[list[int]]:
    """Return, for each optimizer step, the rows that all slices together train on."""
    per_slice = [learned(plan, lengths) for plan in plans]
    return [sorted(chain.from_iterable(step)) for step in zip(*per_slice, strict=True)]


@given(LENGTHS, st.fixed_dictionaries(PLANS))
def test_every_row_is_trained_on_once_per_epoch(lengths: list[int], shape: dict[str, int]) -> None:
    lengths = [length + 1 for length in lengths]  # each row has at least one action
    plans = plan_update(lengths, **shape, seed=0)
    seen = Counter(row for step in union(plans, lengths) for row in step)
    assert seen == dict.fromkeys(range(len(lengths)), shape["epochs"])


@given(LENGTHS, st.fixed_dictionaries(PLANS), st.integers(0, 9))
def test_rows_of_a_step_do_not_depend_on_the_number_of_slices(
    lengths: list[int], shape: dict[str, int], seed: int
) -> None:
    lengths = [length + 1 for length in lengths]
    many = union(plan_update(lengths, **shape, seed=seed), lengths)
    one = union(plan_update(lengths, **shape | {"slices": 1}, seed=seed), lengths)
    assert many == one


def test_rows_left_over_after_full_batches_form_a_smaller_step() -> None:
    [plan] = plan_update([3] * 10, slices=1, batch_size=4, epochs=2, seed=0)
    assert [len(step) for step in plan.steps] == [4, 4, 2, 4, 4, 2]


def test_epochs_are_shuffled_differently_and_depend_on_the_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        [plan] = plan_update([3] * 32, slices=1, batch_size=16, epochs=2, seed=seed)
        return plan.steps

    first, second = orders(7)[:2], orders(7)[2:]
    assert first != second
    assert orders(7) == [*first, *second]
    assert orders(8) != [*first, *second]


def test_slices_get_nearly_equal_numbers_of_tokens() -> None:
    lengths = [8, 7, 6, 5, 4]
    plans = plan_update(lengths, slices=2, batch_size=5, epochs=1, seed=0)
    tokens = sorted(sum(lengths[row] for row in plan.rows) for plan in plans)
    assert tokens == [14, 16]


def test_slice_is_sent_only_the_rows_of_its_steps() -> None:
    plans = plan_update([2] * 8, slices=2, batch_size=4, epochs=1, seed=0)
    assert all(len(plan.rows) == 4 for plan in plans)
    assert sorted(plans[0].rows + plans[1].rows) == list(range(8))


@pytest.mark.parametrize("rows", [1, 2])
def test_slice_without_rows_runs_the_same_steps_on_uncounted_copies(rows: int) -> None:
    lengths = [4] * rows
    plans = plan_update(lengths, slices=3, batch_size=3, epochs=2, seed=0)
    spare = plans[-1]
    assert len(spare.steps) == 2
    assert learned(spare, lengths) == [[], []]
    assert spare.rows == [0]


def test_slice_without_rows_in_the_last_step_keeps_its_other_rows() -> None:
    lengths = [4] * 5  # two slices share a step of 4 rows and a step of 1 row
    plans = plan_update(lengths, slices=2, batch_size=4, epochs=1, seed=0)
    assert sorted(len(steps[0]) for steps in (learned(plan, lengths) for plan in plans)) == [2, 2]
    assert sorted(len(steps[1]) for steps in (learned(plan, lengths) for plan in plans)) == [0, 1]


def test_last_slices_get_no_rows_if_there_are_fewer_rows_than_slices() -> None:
    assert distribute([5, 5, 5], [2, 0], 3) == [[2], [0], []]


def test_rows_of_a_slice_stay_in_order_so_samples_of_a_prompt_are_adjacent() -> None:
    for plan in plan_update(
        [row % 7 + 1 for row in range(64)], slices=2, batch_size=32, epochs=1, seed=0
    ):
        assert [plan.rows[place] for step in plan.steps for place in step] != plan.rows
        assert all(step == sorted(step) for step in plan.steps)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 5))
def test_rows_of_an_episode_are_in_the_same_optimizer_step(
    conversations: list[int], slices: int, batch_size: int
) -> None:
    episodes = [number for number, count in enumerate(conversations) for _ in range(count)]
    lengths = [number % 5 + 1 for number in episodes]
    plans = plan_update(
        lengths, slices=slices, batch_size=batch_size, epochs=1, seed=0, episodes=episodes
    )
    seen: list[int] = []
    for step in range(len(plans[0].steps)):
        rows = [plan.rows[place] for plan in plans for place in plan.steps[step]]
        chosen = {episodes[row] for row in rows}
        assert len(chosen) <= batch_size
        assert sorted(rows) == [row for row, episode in enumerate(episodes) if episode in chosen]
        seen += rows
    assert sorted(seen) == list(range(len(episodes)))
    assert len(plans[0].steps) == -(-len(conversations) // batch_size)
