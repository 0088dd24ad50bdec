"""The weighted sum of an episode's rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from openrlhf.rewards.protocol import LARGEST
from openrlhf.trajectory import Failure, Trajectory


def combined(trajectory: Trajectory, by_models: Sequence[float], weights: Sequence[float]) -> Trajectory:
    """The episode with the weighted sum of its rewards: of each reward model, then of the rule, if there is one.

    Without weights all count 1; an agent's shares of its reward are weighted like it. The rule's score stays the score; without a rule the sum is the score too. Where there are
    several rewards, each is logged. A sum that is not finite is a failed episode.
    """
    rule = [] if trajectory.reward is None else [trajectory.reward]
    rewards = [*by_models, *rule]
    weights = weights or [1.0] * len(rewards)
    total = math.fsum(w * r for w, r in zip(weights[: len(rewards)], rewards, strict=True))
    if not abs(total) < LARGEST:
        return trajectory.failing(f"its reward is {total}: the reward models gave {list(by_models)}", Failure.RESULT)
    names = [f"reward_model_{i}" for i in range(1, len(by_models) + 1)] + ["reward_rule"] * len(rule)
    parts = dict(zip(names, rewards, strict=True)) if len(rewards) > 1 else {}
    return replace(
        trajectory,
        reward=total,
        score=total if trajectory.score is None else trajectory.score,
        extra_logs={**trajectory.extra_logs, **parts},
        turn_rewards=tuple((position, weights[-1] * share) for position, share in trajectory.turn_rewards),
    )
