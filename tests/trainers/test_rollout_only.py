"""Tests for the metrics of runs that only generate samples."""

from __future__ import annotations

from typing import Any

import pytest

from openrlhf.config.learning import RLFlags
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.rollout_only import RolloutOnly
from tests.trainers.episodes import episode
from tests.trainers.test_ppo import Notes, Steps


class Numbers(Notes):
    """A recorder that keeps the metrics of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[dict[str, float]] = []

    def step(self, step: int, numbers: dict[str, float]) -> None:
        self.numbers.append(numbers)


def test_token_rate_counts_all_conversations_of_an_episode() -> None:
    """The run counts the same tokens as a training run: those of all rows."""
    earlier = episode(0, 0, score=1.0, actions=9)
    batch = [episode(0, 0, score=1.0, actions=4, earlier=(earlier,)), episode(0, 1, score=0.0)]
    recorder: Any = Numbers()
    source: Any = Steps([batch], None)
    RolloutOnly(source, ExperienceMaker(RLFlags()), recorder).fit()
    [logged] = recorder.numbers
    tokens = logged["timing/tokens_per_second"] * logged["timing/step_total"]
    assert tokens == pytest.approx(10 + 5 + 2)
