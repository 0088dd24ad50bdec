"""How many failures end the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.config.flags import UserError
from openrlhf.config.rollout import RewardConfig
from openrlhf.trajectory import Trajectory


class RewardErrors(UserError, RuntimeError):
    """Too many episodes of a batch failed; the message holds the first error."""


@dataclass(frozen=True, kw_only=True)
class ErrorBudget:
    """The fraction of a batch's episodes that may fail."""

    max_error_rate: float

    @classmethod
    def of(cls, reward: RewardConfig) -> ErrorBudget:
        """--reward.max_error_rate; with --reward.on_error drop, all may fail."""
        return cls(max_error_rate=1.0 if reward.on_error == "drop" else reward.max_error_rate)

    def exceeded_by(self, failed: int, *, of: int) -> bool:
        """Whether this number of failures is too large."""
        return failed > self.max_error_rate * of

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise RewardErrors, with the first error, if too many have failed."""
        failed = [trajectory.error for trajectory in trajectories if trajectory.failed]
        self.check_errors(failed, of=len(trajectories), what="episodes failed")

    def check_errors(self, errors: Sequence[str | None], *, of: int, what: str) -> None:
        """Raise RewardErrors, with the first error, if there are too many errors. `what` says what happened: "episodes failed"."""
        if self.exceeded_by(len(errors), of=of):
            raise RewardErrors(
                f"{len(errors)} of {of} {what}, a larger fraction than --reward.max_error_rate {self.max_error_rate:g}. "
                "To go on all the same, raise it or set --reward.on_error drop, which leaves failures out. "
                f"The first error:\n{errors[0]}"
            )
