"""The user's reward function, called in processes that can be killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from openrlhf.config.options import ConfigError
from openrlhf.processes.hosts import HostError, HostPool
from openrlhf.rewards.protocol import RewardRequest, RewardResult, read_rewards
from openrlhf.trajectory import Failure

logger = logging.getLogger(__name__)

ARGUMENTS = ("queries", "prompts", "labels")  # what a reward function is called with, in this order


class FunctionReward:
    """The user's `reward_func(queries, prompts, labels)`, run in the hosts of `pool`.

    It gets lists of length 1, one call per sample, or with `batch` (--reward.batch) all requests at
    once; `timeout` (seconds) bounds each call. It may be `async`, take `**kwargs`, do without
    `labels`, and return a bare tensor or list of rewards.
    """

    def __init__(
        self, path: str | Path, *, pool: HostPool, timeout: float, batch: bool = False, function: str = "reward_func"
    ) -> None:
        self.target = f"{Path(path).resolve()}:{function}"
        self.pool, self.timeout, self.batch = pool, timeout, batch
        self._arguments: _Arguments | None = None

    async def check(self) -> None:
        """Load the file in the hosts. Raises ConfigError with the traceback where that fails."""
        await self._learn_arguments()

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per request; calls run side by side, as many as there are hosts."""
        calls = [list(requests)] if self.batch else [[request] for request in requests]
        results = await asyncio.gather(*(self._call(call) for call in calls if call))
        return [result for call in results for result in call]

    async def _call(self, requests: list[RewardRequest]) -> list[RewardResult]:
        try:
            args, kwargs = (await self._learn_arguments()).of(requests)
            returned = await self.pool.call(self.target, *args, timeout=self.timeout, **kwargs)
            if not isinstance(returned, Mapping):
                notice(self.target, "returns rewards alone; a dict with rewards, scores and extra_logs can say more")
            return read_rewards(returned, len(requests))
        except HostError as error:
            return [RewardResult(error=str(error), failure=error.failure)] * len(requests)
        except ConfigError as error:
            return [RewardResult(error=str(error), failure=Failure.EXCEPTION)] * len(requests)
        except (ValueError, OverflowError) as error:
            return [RewardResult(error=f"{self.target} {error}", failure=Failure.RESULT)] * len(requests)

    async def _learn_arguments(self) -> _Arguments:
        if self._arguments is None:
            try:
                parameters = await self.pool.check(self.target)
            except HostError as error:
                raise ConfigError(f"--reward.remote_url: {error}") from error
            try:
                self._arguments = _Arguments.for_parameters(parameters)
            except ValueError as error:
                raise ConfigError(f"--reward.remote_url: {self.target} {error}") from error
            if "labels" not in self._arguments.names:
                notice(self.target, "takes no labels, and gets none")
        return self._arguments


@cache
def notice(target: str, sentence: str) -> None:
    """Say something about a function once in this process."""
    logger.warning("%s %s.", target, sentence)


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Which of `ARGUMENTS` a function takes, and whether it is called with them by name."""

    names: tuple[str, ...]
    by_name: bool

    @classmethod
    def for_parameters(cls, parameters: list[list[Any]] | None) -> _Arguments:
        """By name where the function uses our names, else by position: [name, kind, required]."""
        if parameters is None:
            return cls(names=ARGUMENTS, by_name=False)
        kinds = {kind for _, kind, _ in parameters}
        by_name = ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
        nameable = {name for name, kind, _ in parameters if kind in by_name}
        names = tuple(name for name in ARGUMENTS if name in nameable or "VAR_KEYWORD" in kinds)
        required = {name for name, _, required in parameters if required}
        if "queries" in names and required <= set(names):
            return cls(names=names, by_name=True)
        places = [name for name, kind, _ in parameters if kind.startswith("POSITIONAL")]
        moved = [name for place, name in enumerate(places) if name in ARGUMENTS and ARGUMENTS.index(name) != place]
        foreign = {"completion", "completions"} & set(places)  # in TRL a response alone
        if moved or foreign:
            raise ValueError(
                f"takes ({', '.join(places)}), but is called with (queries, prompts, labels), a query being prompt and "
                "response: give its parameters these names"
            )
        positions = len(places)
        names = ARGUMENTS if "VAR_POSITIONAL" in kinds else ARGUMENTS[:positions]
        return cls(names=names, by_name=False)

    def of(self, requests: list[RewardRequest]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """The positional and the keyword arguments of a call."""
        columns = {
            "queries": [request.query for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [request.label for request in requests],
        }
        chosen = {name: columns[name] for name in self.names}
        return ([], chosen) if self.by_name else (list(chosen.values()), {})
