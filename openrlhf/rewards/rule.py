"""The reward that the flags name, if code or a server gives it: a function, a verifier, HTTP servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.observability.once import warn_once
from openrlhf.processes.pool import ProcessPool
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult, batches, results_of
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.servers import HTTPServers

VERIFIERS = {  # called with a response and its label; code with a limit of seconds, too
    "math": "openrlhf.rewards.graders:grade_math",
    "code": "openrlhf.rewards.checks:grade_code",
    "format": "openrlhf.rewards.checks:grade_format",
    "length": "openrlhf.rewards.checks:grade_length",
}


def offer_remote_engines(rollout: RemoteEnginesConfig, reward: RuleConfig) -> None:
    """Let agents and reward functions know the servers they may ask by name, once these answer. Raises ConfigError."""
    offer_engines(dict(rollout.named_engines), timeout=reward.timeout, retries=reward.retries)


@contextmanager
def reward_of(
    reward: RuleConfig, *, workers: int | None = None, log_dir: Path | None = None
) -> Iterator[Reward | None]:
    """The function, servers or verifier of these flags, with processes for the code that runs here; None without any."""
    if reward.urls:
        yield HTTPReward(reward.urls, timeout=reward.timeout, retries=reward.retries, batch=reward.batch)
    elif reward.function_path or reward.verifier:
        with ProcessPool(workers or reward.workers, memory_gib=reward.memory_gib, log_dir=log_dir) as pool:
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


class HTTPReward(HTTPServers):
    """Servers that answer POST {"query": [...], "prompts": [...], "labels": [...]} as `read_rewards` says.

    Lists have length 1, or with `batch` (--reward.batch) hold all requests at once.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float, retries: int, batch: bool = False) -> None:
        super().__init__(urls, timeout=timeout, retries=retries)
        self.batch = batch

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per request, in order."""
        return await batches(self._call, requests, together=self.batch)

    async def _call(self, requests: list[RewardRequest]) -> list[RewardResult]:
        body = {
            "query": [request.query for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [request.label for request in requests],
        }
        return await results_of(self.ask(body), len(requests), "reward server:")


class VerifierReward:
    """A built-in check of response against label (--reward.verifier), in the processes of `pool`."""

    def __init__(self, name: str, *, pool: ProcessPool, timeout: float) -> None:
        self.name, self.target = name, VERIFIERS[name]
        self.limits = [timeout] if name == "code" else []
        self.pool, self.timeout = pool, timeout

    async def check(self) -> None:
        """Load the verifier in a process. If it needs the sandbox, say what the sandbox cannot do on this machine."""
        await self.pool.check(self.target)
        if self.name == "code":
            for missing in await self.pool.call("openrlhf.processes.sandbox:missing_protection", timeout=120):
                warn_once(f"--reward.verifier code, on this machine: {missing}.")

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        return await batches(self._verify, requests, together=False)

    async def _verify(self, requests: list[RewardRequest]) -> list[RewardResult]:
        [request] = requests
        answer = request.response_text if request.answer is None else request.answer
        label = request.label if isinstance(request.label, str) else json.dumps(request.label)
        verdict = self.pool.call(self.target, answer, label, *self.limits, timeout=self.timeout)
        return await results_of(verdict, 1, self.target)
