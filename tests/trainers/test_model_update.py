"""The order of a launched update and a refit, with fake processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.rollout import RolloutConfig
from openrlhf.core.batches import Experience
from openrlhf.trainers.model_update import ModelUpdate
from tests.trainers.episodes import episode


def test_refit_after_the_launch_of_an_update_announces_the_updated_weights() -> None:
    """A policy process runs one call at a time, so the refit waits for the launched update."""
    weights: Any = SimpleNamespace(sending=threading.RLock(), version=4)
    versions_at_launch: list[int] = []

    def launch(method: Any, updates: Any) -> list[Any]:
        versions_at_launch.append(weights.version)
        return []

    policy: Any = SimpleNamespace(slices=1, attention_length=None, launch=launch)
    config = RLFlags(train=RLTrainConfig(batch_size=2), rollout=RolloutConfig(batch_size=2))
    update = ModelUpdate(
        policy=policy, critic=None, weights=weights, pretraining=None, config=config
    )
    rows = Experience.from_trajectories([episode(0, sample, score=1.0) for sample in range(2)])
    update.improve(rows, step=4, kl_coef=0.0)
    assert versions_at_launch == [5]
