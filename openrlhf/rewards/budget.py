"""What an episode becomes if its reward failed, and how many failures end the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.config.options import ConfigError
from openrlhf.trajectory import Trajectory


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
    """The fraction of a batch's episodes that may fail (--reward.max_error_rate)."""

    max_error_rate: float
    policy: ErrorPolicy = ErrorPolicy()

    def exceeded(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether too many have failed."""
        return self.exceeded_by(sum(trajectory.failed for trajectory in trajectories), of=len(trajectories))

    def exceeded_by(self, failed: int, *, of: int) -> bool:
        """Whether so many failed episodes are too many."""
        return self.policy.counts and failed > self.max_error_rate * of

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise RewardErrors, with the first error, if too many have failed."""
        if self.exceeded(trajectories):
            failed = [trajectory for trajectory in trajectories if trajectory.failed]
            raise RewardErrors(
                f"{len(failed)} of {len(trajectories)} episodes failed, a larger fraction than "
                f"--reward.max_error_rate {self.max_error_rate:g}. To go on all the same, raise it "
                "or set --reward.on_error to drop or to a number. "
                f"The first error:\n{failed[0].error}"
            )
