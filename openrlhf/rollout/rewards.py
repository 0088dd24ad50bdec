"""Rewards of finished samples: one protocol; the user's function, the built-in verifiers; errors.

A reward that cannot be had is a result with an error, never a number: `ErrorPolicy` says what the
episode becomes, `ErrorBudget` when the run stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from openrlhf.config.options import ConfigError
from openrlhf.rollout.hosts import HostError, HostPool
from openrlhf.trajectory import Failure, Trajectory

logger = logging.getLogger(__name__)

ARGUMENTS = ("queries", "prompts", "labels")  # what a reward function is called with, in this order
LARGEST = 3e38  # of a reward: more is infinite in float32
VERIFIERS = {  # called with a response and its label; code with a limit of seconds, too
    "math": "openrlhf.verifiers.graders:grade_math",
    "code": "openrlhf.verifiers.checks:grade_code",
    "format": "openrlhf.verifiers.checks:grade_format",
    "length": "openrlhf.verifiers.checks:grade_length",
}


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """A sample to be scored. `query` is prompt and response, decoded with special tokens."""

    query: str
    prompt: str
    label: Any = ""
    response: str | None = None  # the sampled text alone; without it, what follows the prompt in the query
    answer: str | None = None  # the same without special tokens, for verifiers

    @property
    def response_text(self) -> str:
        """The response; where only the whole was given, what follows the prompt."""
        if self.response is not None:
            return self.response
        return self.query.rpartition(self.prompt)[2] if self.prompt else self.query


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A sample's reward, or the error that stands in its place (a message with the traceback)."""

    reward: float | None = None
    score: float | None = None  # what dynamic filtering looks at; by default the reward
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None  # the kind of that error


class Reward(Protocol):
    """Whatever scores samples: one result per request, in order; an error is a result too."""

    async def check(self) -> None:
        """Raise ConfigError where it cannot work."""
        ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]: ...


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
            for missing in await self.pool.call("openrlhf.verifiers.sandbox:missing_protection", timeout=120):
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


def read_rewards(returned: Any, count: int) -> list[RewardResult]:
    """What a reward function returned for `count` samples, one result each.

    Expected: {"rewards": numbers, "scores": numbers, "extra_logs": {name: numbers}}, or the rewards
    alone; scores are the rewards by default. Raises ValueError that says what was returned instead.
    """
    if not isinstance(returned, Mapping):
        returned = {"rewards": returned}
    if "rewards" not in returned:
        raise ValueError(f"returned a dict without 'rewards'; its keys are {sorted(map(str, returned))}")
    rewards = _finite("rewards", returned["rewards"], count)
    scores = rewards if returned.get("scores") is None else _finite("scores", returned["scores"], count)
    logs = returned.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise ValueError(f"returned extra_logs that are no dict: {shown(logs)}")
    columns = {str(name): _numbers(f"extra_logs[{name!r}]", value, count) for name, value in logs.items()}
    return [
        RewardResult(reward=reward, score=score, extra_logs={name: column[i] for name, column in columns.items()})
        for i, (reward, score) in enumerate(zip(rewards, scores, strict=True))
    ]


def _finite(name: str, value: Any, count: int) -> list[float]:
    numbers = _numbers(name, value, count)
    if not all(abs(number) < LARGEST for number in numbers):
        raise ValueError(f"returned {name} that are not finite: {shown(numbers)}")
    return numbers


def _numbers(name: str, value: Any, count: int) -> list[float]:
    """`value` (a number, or lists of them as tensors give them) as `count` floats."""
    flat = _flatten(value)
    if not all(isinstance(item, bool | int | float) for item in flat):
        raise ValueError(f"returned {name} that are not numbers: {shown(value)}")
    if len(flat) != count:
        raise ValueError(f"returned {len(flat)} {name} for {count} samples: {shown(value)}")
    return [float(item) for item in flat]


def _flatten(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, list) else [value]


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


@dataclass(frozen=True, kw_only=True)
class ErrorPolicy:
    """What an episode whose reward failed becomes (--reward.on_error)."""

    fallback: float | None = None  # the reward it is kept with; None: it is a failed episode
    counts: bool = True  # whether a failed episode counts towards --reward.max_error_rate

    @classmethod
    def parse(cls, text: str) -> ErrorPolicy:
        """`fail`, `drop` or a number. Raises ConfigError for anything else."""
        if text in ("fail", "drop"):
            return cls(counts=text == "fail")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--reward.on_error is {text!r}; it takes fail, drop or a number.")
        return cls(fallback=number)


class RewardErrors(RuntimeError):
    """Too many episodes of a batch failed; the message holds the first error."""


@dataclass(frozen=True, kw_only=True)
class ErrorBudget:
    """The share of a batch's episodes that may fail (--reward.max_error_rate)."""

    max_error_rate: float
    policy: ErrorPolicy = ErrorPolicy()

    def exceeded(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether too large a share has failed."""
        return self.exceeded_by(sum(trajectory.failed for trajectory in trajectories), of=len(trajectories))

    def exceeded_by(self, failed: int, *, of: int) -> bool:
        """Whether so many failed episodes are too large a share."""
        return self.policy.counts and failed > self.max_error_rate * of

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise RewardErrors, with the first error, where too large a share has failed."""
        if self.exceeded(trajectories):
            failed = [trajectory for trajectory in trajectories if trajectory.failed]
            raise RewardErrors(
                f"{len(failed)} of {len(trajectories)} episodes failed, a larger share than "
                f"--reward.max_error_rate {self.max_error_rate:g}. To go on all the same, raise it "
                "or set --reward.on_error to drop or to a number. "
                f"The first error:\n{failed[0].error}"
            )
