"""Tests for the reward scale that is measured by a reward model's evaluation."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.config.supervised import RMConfig
from openrlhf.data.feedback import PairRow
from openrlhf.observability.metrics import merge_all, values
from openrlhf.trainers.reward import RewardTask

TASK = RewardTask(RMConfig())


def evaluation(rewards: list[float], *, pairs_at_once: int) -> dict[str, float]:
    """Return the metrics of an evaluation.

    `rewards` alternates between the chosen and the rejected answer of each pair.
    """
    batch = TASK.collate([PairRow(chosen=[4, 5], rejected=[4, 6])] * (len(rewards) // 2))
    metrics = []
    for first in range(0, len(rewards), 2 * pairs_at_once):
        part = rewards[first : first + 2 * pairs_at_once]
        scores = torch.tensor(part).repeat_interleave(2)  # the head's output for each text's tokens

        def model(tokens: Any, offsets: Any, scores: torch.Tensor = scores) -> SimpleNamespace:
            return SimpleNamespace(values=scores, aux_loss=None)

        metrics.append(TASK.loss(model, batch.select(range(len(part))), {"pairs": 1.0})[1])
    return values(TASK.evaluation_names(merge_all(metrics)))


def test_deviation_of_equal_rewards_is_stored_as_a_small_positive_value() -> None:
    assert evaluation([0.7] * 14, pairs_at_once=2)["eval/reward_std"] == 1e-8


@pytest.mark.parametrize("pairs_at_once", [1, 3, 8])
def test_deviation_is_exact_even_with_a_large_mean(pairs_at_once: int) -> None:
    rewards = [50 + 0.0117 * math.sin(number) for number in range(16)]
    seen = [float(torch.tensor(reward)) for reward in rewards]  # float32
    numbers = evaluation(rewards, pairs_at_once=pairs_at_once)
    assert numbers["eval/reward_mean"] == pytest.approx(statistics.mean(seen), rel=1e-12)
    assert numbers["eval/reward_std"] == pytest.approx(statistics.stdev(seen), rel=1e-9)


@pytest.mark.parametrize(("pairs", "measured"), [(1, 1), (50, 50), (200, 100), (20_000, 200)])
def test_reward_scale_is_measured_on_one_percent_of_the_pairs_but_at_least_100(
    pairs: int, measured: int
) -> None:
    """With few pairs, --reward.normalize_enable would divide by an unreliable std."""
    assert len(TASK.measured_rows(range(pairs))) == measured
