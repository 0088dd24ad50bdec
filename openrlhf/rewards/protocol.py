"""Rewards of finished samples: the request, the result, and the weighted sum of several rewards.

A failed reward is a result with an error, never a number. --reward.on_error decides whether the
episode is dropped, and `ErrorBudget` decides when the run stops.
"""

from __future__ import annotations

import asyncio
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.core.trajectory import Failure, Trajectory
from openrlhf.isolation.call import UserCodeError
from openrlhf.rewards.servers import ServerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_REWARD = 3e38  # larger values overflow float32 to infinity


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """A sample to score. Text fields that the reward does not read are empty."""

    query: str  # prompt and response, with special tokens
    prompt: str
    label: Any = ""
    response: str = ""  # only the sampled text
    answer: str = ""  # the response without special tokens, for verifiers


def request_of(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    label: Any,
    tokens: Sequence[int],
    sampled: Sequence[int],
    *,
    extra_fields: Collection[str] = ("query", "answer"),
) -> RewardRequest:
    """Return the request for a sample.

    `query` and `answer` are decoded only if `extra_fields` lists them, because decoding takes time.
    """

    def decode(tokens: Sequence[int], *, special: bool) -> str:
        # Transformers inspects each token in a list but not in an array.
        array = np.asarray(tokens, dtype=np.int64)
        return str(tokenizer.decode(array, skip_special_tokens=not special))

    query = ""
    if "query" in extra_fields:
        query = decode([*tokens, *sampled], special=True)
    response = decode(sampled, special=True)
    answer = ""
    if "answer" in extra_fields:
        answer = decode(sampled, special=False)
    return RewardRequest(query=query, prompt=prompt, label=label, response=response, answer=answer)


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A sample's reward, or the error (a message with the traceback) if the reward failed."""

    reward: float | None = None
    score: float | None = None  # used by dynamic filtering; defaults to the reward
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None  # the kind of `error`


class Reward(ABC):
    """A source of rewards for samples.

    A call receives one request, or all requests if `batch` is set. Calls run concurrently.
    """

    source: str  # name of the reward in messages
    batch = False
    # Request fields that the reward needs in addition to prompt, label and response.
    extra_fields: Collection[str] = ("query",)

    @abstractmethod
    async def check(self) -> None:
        """Raise ConfigError if the reward cannot work."""

    @abstractmethod
    async def ask(self, requests: list[RewardRequest]) -> Any:
        """Make one call and return the value to be parsed by `read_rewards`.

        Raises UserCodeError or ServerError, which carry the kind of failure.
        """

    async def aclose(self) -> None:  # noqa: B027 — most rewards hold nothing open
        """Close the connections that `ask` opened in this event loop. Call this method last."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return one result per request, in order. Errors are returned as results."""
        calls = [[request] for request in requests]
        if self.batch and requests:
            calls = [list(requests)]
        return list(chain.from_iterable(await asyncio.gather(*map(self._score, calls))))

    async def _score(self, requests: list[RewardRequest]) -> list[RewardResult]:
        try:
            return read_rewards(await self.ask(requests), len(requests))
        except (TypeError, ValueError, OverflowError) as error:
            failed = RewardResult(error=f"{self.source} {error}", failure=Failure.RESULT)
        except (UserCodeError, ServerError) as error:
            failed = RewardResult(error=str(error), failure=error.failure)
        return [failed] * len(requests)


def columns(requests: Sequence[RewardRequest]) -> dict[str, list[Any]]:
    """Return the requests as arguments for a reward function."""
    return {
        "queries": [request.query for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.label for request in requests],
    }


def read_rewards(returned: Any, count: int) -> list[RewardResult]:
    """Convert a reward function's return value into `count` results, one per sample.

    The expected value is {"rewards": numbers, "scores": numbers, "extra_logs": {name: numbers}}, or
    just the rewards. Scores default to the rewards. Raises ValueError, quoting the value, for any
    other value.
    """
    problems: list[str] = []

    def read(name: str, value: Any, *, finite: bool = False) -> list[float]:
        try:
            return numbers(name, value, count, finite=finite)
        except ValueError as error:
            problems.append(str(error))
            return []

    if not isinstance(returned, Mapping):
        returned = {"rewards": returned}
    rewards: list[float] = []
    if "rewards" in returned:
        rewards = read("rewards", returned["rewards"], finite=True)
    else:
        keys = sorted(map(str, returned))
        problems.append(f"returned a dict without 'rewards'; its keys are {keys}")
    scores = rewards
    if returned.get("scores") is not None:
        scores = read("scores", returned["scores"], finite=True)
    logs = returned.get("extra_logs") or {}
    log_columns: dict[str, list[float]] = {}
    if isinstance(logs, Mapping):
        for name, value in logs.items():
            log_columns[str(name)] = read(f"extra_logs[{name!r}]", value)
    else:
        problems.append(f"returned extra_logs that are not a dict: {shown(logs)}")
    if problems:
        raise ValueError("; ".join(problems))
    results: list[RewardResult] = []
    for index in range(count):
        sample_logs = {name: column[index] for name, column in log_columns.items()}
        result = RewardResult(reward=rewards[index], score=scores[index], extra_logs=sample_logs)
        results.append(result)
    return results


def numbers(
    name: str, value: Any, count: int, *, of: str = "samples", finite: bool = False
) -> list[float]:
    """Return `value`, a number or (nested) lists of numbers, as `count` floats.

    The message uses `of` as the noun for the items. Raises ValueError, quoting the value, for any
    other `value`.
    """
    flat = _flatten(value)
    if not all(isinstance(item, bool | int | float) for item in flat):
        raise ValueError(f"returned {name} that are not numbers: {shown(value)}")
    if len(flat) != count:
        raise ValueError(f"returned {len(flat)} {name} for {count} {of}: {shown(value)}")
    floats = [float(item) for item in flat]
    if finite and not all(abs(number) < LARGEST_REWARD for number in floats):
        raise ValueError(f"returned {name} that are not finite: {shown(floats)}")
    return floats


def _flatten(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    leaves: list[Any] = []
    for item in value:
        leaves += _flatten(item)
    return leaves


def shown(value: Any) -> str:
    """Return the beginning of a value's repr for use in a message."""
    text = repr(value)
    if len(text) <= 200:
        return text
    return text[:200] + "…"


def combined(
    trajectory: Trajectory,
    by_models: Sequence[float],
    weights: Sequence[float],
    by_steps: Sequence[float] = (),
) -> Trajectory:
    """Return the episode with the weighted sum of its rewards (models first, then the rule).

    The rule's reward is the episode's current reward, if it has one. `by_steps` contains the
    per-token rewards from a process reward model; their sum is the last of the models' rewards.

    Without weights, each reward has weight 1. An agent's turn rewards are weighted like its reward.
    The score remains the rule's score; without a rule, the weighted sum becomes the score. If there
    are several rewards, each reward is logged. A non-finite sum fails the episode.
    """
    model_rewards = list(by_models)
    if by_steps:
        model_rewards.append(math.fsum(by_steps))
    rewards = {f"reward_model_{number}": value for number, value in enumerate(model_rewards, 1)}
    if trajectory.reward is not None:
        rewards["reward_rule"] = trajectory.reward
    weights = weights or [1.0] * len(rewards)
    total = math.fsum(map(operator.mul, weights, rewards.values()))
    if not abs(total) < LARGEST_REWARD:
        message = f"the reward is {total}: the reward models returned {model_rewards}"
        return trajectory.failing(message, Failure.RESULT)
    turn_rewards = [(position, weights[-1] * part) for position, part in trajectory.turn_rewards]
    for position, part in enumerate(by_steps):
        if part:
            turn_rewards.append((position, weights[len(model_rewards) - 1] * part))
    logs = dict(trajectory.extra_logs)
    if len(rewards) > 1:
        logs.update(rewards)
    score = trajectory.score
    if score is None:
        score = total
    return replace(
        trajectory,
        reward=total,
        score=score,
        extra_logs=logs,
        turn_rewards=tuple(turn_rewards),
    )
