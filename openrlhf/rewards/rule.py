"""The reward selected by the flags: a function, a verifier or HTTP servers."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from openrlhf.config.rollout import RuleConfig
from openrlhf.isolation.pool import ProcessPool
from openrlhf.reporting import warn_once
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.protocol import Reward, RewardRequest, columns
from openrlhf.rewards.servers import HTTPServers

VERIFIERS = {  # called with a response and its label, and for `code` with a time limit in seconds
    "math": "openrlhf.rewards.graders:grade_math",
    "code": "openrlhf.rewards.checks:grade_code",
    "format": "openrlhf.rewards.checks:grade_format",
    "length": "openrlhf.rewards.checks:grade_length",
}


@contextmanager
def reward_of(
    reward: RuleConfig, *, workers: int | None = None, log_dir: Path | None = None
) -> Iterator[Reward | None]:
    """Yield the function, servers or verifier selected by these flags, or None.

    A function or verifier runs in a pool of processes, which is closed when the block exits.
    """
    if reward.urls:
        yield HTTPReward(reward)
    elif reward.function_path or reward.verifier:
        pool = ProcessPool(workers or reward.workers, memory_gib=reward.memory_gib, log_dir=log_dir)
        with closing(pool):
            if reward.verifier:
                yield VerifierReward(reward, pool)
            else:
                yield FunctionReward(reward, pool)
    else:
        yield None


class HTTPReward(HTTPServers, Reward):
    """Servers that accept POST {"query": [...], "prompts": [...], "labels": [...]}.

    The response format is described in `read_rewards`.
    """

    source = "reward server:"

    def __init__(self, rule: RuleConfig) -> None:
        super().__init__(rule.urls, rule, kind="reward server", flag="--reward.remote_url")
        self.batch = rule.batch

    async def ask(self, requests: list[RewardRequest]) -> Any:
        """Return the response from one of the servers."""
        asked = columns(requests)
        return await self.send({"query": asked.pop("queries"), **asked})


class VerifierReward(Reward):
    """A built-in verifier (--reward.verifier) that runs in the processes of `pool`."""

    extra_fields = ("answer",)

    def __init__(self, rule: RuleConfig, pool: ProcessPool) -> None:
        assert rule.verifier
        self.source = VERIFIERS[rule.verifier]
        self.pool = pool
        self.timeout = rule.timeout
        self.sandboxed = rule.verifier == "code"

    async def check(self) -> None:
        """Load the verifier in a process.

        If the verifier needs the sandbox, warn about protections that this machine lacks.
        """
        await self.pool.check(self.source)
        if self.sandboxed:
            for missing in await self.pool.call(
                "openrlhf.isolation.sandbox:missing_protection", timeout=120
            ):
                warn_once(
                    f"--reward.verifier code is not fully isolated on this machine: {missing}."
                )

    async def ask(self, requests: list[RewardRequest]) -> Any:
        """Return the verifier's result for one response."""
        [request] = requests
        arguments = [request.answer, request.label]
        if self.sandboxed:
            arguments.append(self.timeout)
        return await self.pool.call(self.source, *arguments, timeout=self.timeout)
