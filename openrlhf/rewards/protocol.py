"""Rewards of finished samples: what a reward is asked, what it gives, and the weighted sum of
several.

A failed reward is a result with an error, never a number: --reward.on_error says what the episode
becomes, `ErrorBudget` when the run stops.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.trajectory import Failure, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST = 3e38  # of a reward: more is infinite in float32


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """A sample to be scored. Texts that the reward does not read are empty."""

    query: str  # prompt and response, with special tokens
    prompt: str
    label: Any = ""
    response: str = ""  # the sampled text alone
    answer: str = ""  # the response without special tokens, for verifiers


def request_of(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    label: Any,
    tokens: Sequence[int],
    sampled: Sequence[int],
    *,
    reads: Collection[str] = ("query", "answer"),
) -> RewardRequest:
    """The request for a sample. Query and answer stay empty unless they are in `reads`, because
    decoding takes time.
    """

    def text(tokens: Sequence[int], *, special: bool) -> str:
        # of an array: Transformers looks at each token of a list
        return str(
            tokenizer.decode(np.asarray(tokens, dtype=np.int64), skip_special_tokens=not special)
        )

    return RewardRequest(
        query=text([*tokens, *sampled], special=True) if "query" in reads else "",
        prompt=prompt,
        label=label,
        response=text(sampled, special=True),
        answer=text(sampled, special=False) if "answer" in reads else "",
    )


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A sample's reward, or the error in its place (a message with the traceback)."""

    reward: float | None = None
    score: float | None = None  # what dynamic filtering looks at; by default the reward
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None  # the kind of that error


class Reward(ABC):
    """Scores samples. A call gets one request, or with `batch` all requests together; calls run
    side by side.
    """

    source: str  # what messages call the reward
    batch = False
    reads: Collection[str] = (
        "query",
    )  # what it needs of a request besides prompt, label and response

    @abstractmethod
    async def check(self) -> None:
        """Raise ConfigError if the reward cannot work."""

    @abstractmethod
    async def ask(self, requests: list[RewardRequest]) -> Any:
        """What one call returns, for `read_rewards`. Raises UserCodeError or ServerError, which say
        what kind of failure they are.
        """

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per request, in order; an error is a result too."""
        calls = [list(requests)] if self.batch else [[request] for request in requests]
        results = await asyncio.gather(*(self._score(call) for call in calls if call))
        return [result for call_results in results for result in call_results]

    async def _score(self, requests: list[RewardRequest]) -> list[RewardResult]:
        try:
            return read_rewards(await self.ask(requests), len(requests))
        except (TypeError, ValueError, OverflowError) as error:
            failed = RewardResult(error=f"{self.source} {error}", failure=Failure.RESULT)
        except RuntimeError as error:
            failure = getattr(error, "failure", None)
            if failure is None:
                raise
            failed = RewardResult(error=str(error), failure=failure)
        return [failed] * len(requests)


def columns(requests: Sequence[RewardRequest]) -> dict[str, list[Any]]:
    """The requests as the arguments of a reward function."""
    return {
        "queries": [request.query for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.label for request in requests],
    }


def read_rewards(returned: Any, count: int) -> list[RewardResult]:
    """What a reward function returned for `count` samples, one result each.

    Expected: {"rewards": numbers, "scores": numbers, "extra_logs": {name: numbers}}, or the rewards
    alone; scores are the rewards by default. Raises ValueError that says what was returned instead.
    """
    if not isinstance(returned, Mapping):
        returned = {"rewards": returned}
    if "rewards" not in returned:
        raise ValueError(
            f"returned a dict without 'rewards'; its keys are {sorted(map(str, returned))}"
        )
    rewards = numbers("rewards", returned["rewards"], count, finite=True)
    scores = (
        rewards
        if returned.get("scores") is None
        else numbers("scores", returned["scores"], count, finite=True)
    )
    logs = returned.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise ValueError(f"returned extra_logs that are no dict: {shown(logs)}")
    columns = {
        str(name): numbers(f"extra_logs[{name!r}]", value, count) for name, value in logs.items()
    }
    return [
        RewardResult(
            reward=reward,
            score=score,
            extra_logs={name: column[i] for name, column in columns.items()},
        )
        for i, (reward, score) in enumerate(zip(rewards, scores, strict=True))
    ]


def numbers(
    name: str, value: Any, count: int, *, of: str = "samples", finite: bool = False
) -> list[float]:
    """`value` (a number, or lists of them as tensors give them) as `count` floats, one for each
    `of`.

    Raises ValueError that says what was returned instead.
    """
    flat = _flatten(value)
    if not all(isinstance(item, bool | int | float) for item in flat):
        raise ValueError(f"returned {name} that are not numbers: {shown(value)}")
    if len(flat) != count:
        raise ValueError(f"returned {len(flat)} {name} for {count} {of}: {shown(value)}")
    floats = [float(item) for item in flat]
    if finite and not all(abs(number) < LARGEST for number in floats):
        raise ValueError(f"returned {name} that are not finite: {shown(floats)}")
    return floats


def _flatten(value: Any) -> list[Any]:
    return (
        [leaf for item in value for leaf in _flatten(item)] if isinstance(value, list) else [value]
    )


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def combined(
    trajectory: Trajectory,
    by_models: Sequence[float],
    weights: Sequence[float],
    by_steps: Sequence[float] = (),
) -> Trajectory:
    """The episode with the weighted sum of its rewards: of each model, then of the rule, if there
    is one.

    `by_steps`: what a process reward model gives each token; its sum is the last of the models'
    rewards.

    Without weights each counts 1. An agent's rewards of turns are weighted like its reward. The
    rule's score stays the score; without a rule the sum is the score too. Each of several rewards
    is logged. A sum that is not finite fails the episode.
    """
    rule = [] if trajectory.reward is None else [trajectory.reward]
    by_models = [*by_models, *([math.fsum(by_steps)] if by_steps else [])]
    rewards = [*by_models, *rule]
    weights = weights or [1.0] * len(rewards)
    total = math.fsum(w * r for w, r in zip(weights[: len(rewards)], rewards, strict=True))
    if not abs(total) < LARGEST:
        return trajectory.failing(
            f"its reward is {total}: the reward models gave {list(by_models)}", Failure.RESULT
        )
    names = [f"reward_model_{i}" for i in range(1, len(by_models) + 1)] + ["reward_rule"] * len(
        rule
    )
    parts = dict(zip(names, rewards, strict=True)) if len(rewards) > 1 else {}
    turns = [(position, weights[-1] * part) for position, part in trajectory.turn_rewards]
    steps = [
        (place, weights[len(by_models) - 1] * part) for place, part in enumerate(by_steps) if part
    ]
    return replace(
        trajectory,
        reward=total,
        score=total if trajectory.score is None else trajectory.score,
        extra_logs={**trajectory.extra_logs, **parts},
        turn_rewards=(*turns, *steps),
    )
