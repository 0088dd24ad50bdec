"""HTTP servers that are asked for rewards: where a request goes, when it is tried again, and what its failure says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openrlhf.rewards.protocol import RewardRequest, RewardResult, read_rewards
from openrlhf.rewards.servers import HTTPServers, ServerError
from openrlhf.trajectory import Failure


class HTTPReward(HTTPServers):
    """Servers that answer POST {"query": [...], "prompts": [...], "labels": [...]} as `read_rewards` says.

    Lists are of length 1, or with `batch` (--reward.batch) of all requests at once.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float, retries: int, batch: bool = False) -> None:
        super().__init__(urls, timeout=timeout, retries=retries)
        self.batch = batch

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per request, in order."""
        calls = [list(requests)] if self.batch else [[request] for request in requests]
        results = await asyncio.gather(*(self._call(call) for call in calls if call))
        return [result for call in results for result in call]

    async def _call(self, requests: list[RewardRequest]) -> list[RewardResult]:
        body = {
            "query": [request.query for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [request.label for request in requests],
        }
        try:
            return read_rewards(await self.ask(body), len(requests))
        except ServerError as error:
            return [RewardResult(error=str(error), failure=Failure.SERVER)] * len(requests)
        except (TypeError, ValueError, OverflowError) as error:  # no JSON, there or here, or not what was asked for
            return [RewardResult(error=f"reward server: {error}", failure=Failure.RESULT)] * len(requests)
