"""Rewards of finished samples: one protocol; the user's function, the built-in verifiers; errors.

A reward that cannot be had is a result with an error, never a number: `ErrorPolicy` says what the
episode becomes, `ErrorBudget` when the run stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.trajectory import Failure

LARGEST = 3e38  # of a reward: more is infinite in float32


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
