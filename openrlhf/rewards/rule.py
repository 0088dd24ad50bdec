"""The reward that the flags name, where code or a server gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.processes.hosts import HostPool
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.http import HTTPReward
from openrlhf.rewards.protocol import Reward
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.verifiers import VerifierReward


def offer_remote_engines(rollout: RemoteEnginesConfig, reward: RuleConfig) -> None:
    """Let agents and reward functions know the servers they may ask by name, once these answer. Raises ConfigError."""
    offer_engines(dict(rollout.named_engines), timeout=reward.timeout, retries=reward.retries)


@contextmanager
def reward_of(
    reward: RuleConfig, *, workers: int | None = None, log_dir: Path | None = None
) -> Iterator[Reward | None]:
    """The function, server or verifier of these flags, with hosts for the code that runs here; None where there is none."""
    if reward.urls:
        yield HTTPReward(reward.urls, timeout=reward.timeout, retries=reward.retries, batch=reward.batch)
    elif reward.function_path or reward.verifier:
        with HostPool(workers or reward.workers, memory_gib=reward.memory_gib, log_dir=log_dir) as pool:
            if reward.verifier:
                yield VerifierReward(reward.verifier, pool=pool, timeout=reward.timeout)
            else:
                assert reward.function_path
                yield FunctionReward(reward.function_path, pool=pool, timeout=reward.timeout, batch=reward.batch)
    else:
        yield None


def check_reward(rule: RuleConfig) -> None:
    """Load the reward function, or reach the servers, before anything else. Raises ConfigError."""
    if rule.remote_url:
        with reward_of(rule, workers=1) as reward:
            assert reward is not None
            asyncio.run(reward.check())
