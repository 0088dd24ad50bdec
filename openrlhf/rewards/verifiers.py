"""Built-in checks of a response against its label, called in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from openrlhf.processes.hosts import HostError, HostPool
from openrlhf.rewards.protocol import RewardRequest, RewardResult, read_rewards

logger = logging.getLogger(__name__)

VERIFIERS = {  # called with a response and its label; code with a limit of seconds, too
    "math": "openrlhf.rewards.graders:grade_math",
    "code": "openrlhf.rewards.checks:grade_code",
    "format": "openrlhf.rewards.checks:grade_format",
    "length": "openrlhf.rewards.checks:grade_length",
}


class VerifierReward:
    """A built-in check of response against label (--reward.verifier), in the hosts of `pool`."""

    def __init__(self, name: str, *, pool: HostPool, timeout: float) -> None:
        self.name, self.target = name, VERIFIERS[name]
        self.limits = [timeout] if name == "code" else []
        self.pool, self.timeout = pool, timeout

    async def check(self) -> None:
        """Load the verifier in the hosts. Of a sandbox, say what it cannot do on this machine."""
        await self.pool.check(self.target)
        if self.name == "code":
            for missing in await self.pool.call("openrlhf.processes.sandbox:missing_protection", timeout=120):
                logger.warning("--reward.verifier code, on this machine: %s.", missing)

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        return list(await asyncio.gather(*(self._verify(request) for request in requests)))

    async def _verify(self, request: RewardRequest) -> RewardResult:
        answer = request.response_text if request.answer is None else request.answer
        label = request.label if isinstance(request.label, str) else json.dumps(request.label)
        try:
            returned = await self.pool.call(self.target, answer, label, *self.limits, timeout=self.timeout)
        except HostError as error:
            return RewardResult(error=str(error), failure=error.failure)
        return read_rewards(returned, 1)[0]
