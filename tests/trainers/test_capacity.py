"""Tests for the capacity rule of asynchronous training, with samples that finish in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.trainers.capacity import Capacity, Held

rules = st.builds(
    Capacity, batch=st.integers(1, 4), queue=st.integers(1, 4), staleness=st.integers(1, 6)
)


def run(
    rule: Capacity, prompts: int, draw: random.Random, rejected: float
) -> list[tuple[list[int], int, list[int]]]:
    """Simulate a run in which a random event happens at each turn.

    Returns, for each step, its prompts, its weight version, and the weight version at which each
    prompt started.
    """
    held: dict[int, Held] = {}
    steps: list[tuple[list[int], int, list[int]]] = []
    version = started = trained = 0
    training = False
    while started < prompts or held or training:
        room = rule.room(list(held.values()))
        assert room + sum(not each.filtered for each in held.values()) <= rule.queue * rule.batch
        for _ in range(min(room, prompts - started)):
            held[started] = Held(version=version)
            started += 1
        under_way = [prompt for prompt, each in held.items() if not each.finished]
        step = (
            None
            if training
            else rule.next_step(list(held.values()), version, last=started == prompts)
        )
        choices = (
            ["finish"] * bool(under_way) + ["train"] * (step is not None) + ["publish"] * training
        )
        assert choices, "nothing can go on"
        match draw.choice(choices):
            case "finish":
                chosen = held[draw.choice(under_way)]
                chosen.finished, chosen.filtered = True, draw.random() < rejected
            case "train":
                assert step is not None
                taken = [list(held)[place] for place in step]
                kept = [prompt for prompt in taken if not held[prompt].filtered]
                steps.append((kept, version, [held[prompt].version for prompt in kept]))
                trained += len(taken)
                for prompt in taken:
                    del held[prompt]
                training = True
            case _:
                version, training = version + 1, False
    assert trained == prompts  # no prompt is lost
    return steps


@settings(max_examples=300, deadline=None)
@given(rules, st.integers(1, 40), st.integers(), st.sampled_from([0.0, 0.3]))
def test_samples_are_never_too_old_or_lost_and_every_step_is_full(
    rule: Capacity, prompts: int, seed: int, rejected: float
) -> None:
    steps = run(rule, prompts, random.Random(seed), rejected)
    for kept, version, begun in steps:
        assert all(version - each <= rule.staleness for each in begun)
        assert kept == sorted(kept)
    sizes = [len(kept) for kept, _, _ in steps]
    assert all(size == rule.batch for size in sizes[:-1])
    trained = [prompt for kept, _, _ in steps for prompt in kept]
    assert len(trained) == len(set(trained))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers())
def test_steps_are_nearly_in_order_if_staleness_equals_queue_size(
    batch: int, queue: int, prompts: int, seed: int
) -> None:
    """A prompt's position in the run differs from its index by at most the queue size."""
    rule = Capacity(batch=batch, queue=queue, staleness=queue)
    trained = [
        prompt for kept, _, _ in run(rule, prompts, random.Random(seed), 0.0) for prompt in kept
    ]
    assert all(abs(place - prompt) <= queue * batch for place, prompt in enumerate(trained))


def test_step_waits_for_an_old_sample_but_not_for_a_young_one() -> None:
    rule = Capacity(batch=1, queue=2, staleness=2)
    old, new = Held(version=3), Held(version=4, finished=True)
    # The step at version 5 may still train on samples that started at version 3.
    assert rule.next_step([old, new], 4) == [1]
    assert rule.next_step([old, new], 5) is None
    old.finished = True
    assert rule.next_step([old, new], 5) == [0]


def test_rejected_prompt_frees_capacity_and_belongs_to_the_preceding_step() -> None:
    rule = Capacity(batch=1, queue=2, staleness=2)
    rejected = Held(version=0, finished=True, filtered=True)
    held = [Held(version=0, finished=True), rejected, Held(version=0)]
    assert rule.room(held) == 0 and rule.room(held[:2]) == 1
    assert rule.next_step(held, 0) == [0]
    assert rule.next_step(held[1:], 1) is None
    held[2].finished = True
    assert rule.next_step(held[1:], 1) == [0, 1]
    assert rule.next_step([rejected], 2) is None
    assert rule.next_step([rejected], 2, last=True) == [0]


@pytest.mark.parametrize("queue", [1, 2, 4])
def test_lag_of_samples_that_finish_in_order_equals_the_queue_size(queue: int) -> None:
    rule, held, lags = Capacity(batch=2, queue=queue, staleness=queue), list[Held](), list[int]()
    for version in range(8):
        held += [Held(version=version, finished=True) for _ in range(rule.room(held))]
        step = rule.next_step(held, version)
        assert step == [0, 1]
        lags.append(version - held[0].version)
        held = held[2:] + [
            Held(version=version, finished=True) for _ in range(2)
        ]  # these samples finish while the step trains
    assert lags[queue:] == [queue] * (8 - queue)
