"""Limit on the failed episodes of a batch, above which the run ends."""

from collections.abc import Sequence

from openrlhf.config.flags import UserError
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.trajectory import Trajectory


class RewardErrors(UserError, RuntimeError):
    """Too many episodes of a batch failed; the message holds the first error."""


class ErrorBudget:
    """The fraction of a batch's episodes that may fail.

    It is --reward.max_error_rate, or 1 with --reward.on_error drop.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self.max_error_rate = reward.max_error_rate
        if reward.on_error == "drop":
            self.max_error_rate = 1.0

    def exceeded_by(self, failed: int, *, of: int) -> bool:
        """Return whether `failed` of `of` failures exceed the fraction."""
        return failed > self.max_error_rate * of

    def check(self, trajectories: Sequence[Trajectory], *, of: str = "episodes") -> None:
        """Raise RewardErrors, with the first error, if too many trajectories have failed.

        `of` names the trajectories in the message.
        """
        failed = [trajectory.error for trajectory in trajectories if trajectory.failed]
        self.check_errors(failed, of=len(trajectories), what=f"{of} failed")

    def check_errors(self, errors: Sequence[str | None], *, of: int, what: str) -> None:
        """Raise RewardErrors, with the first error, if there are too many errors.

        `what` describes the errors in the message: "episodes failed".
        """
        if self.exceeded_by(len(errors), of=of):
            raise RewardErrors(
                f"{len(errors)} of {of} {what}, a larger fraction than --reward.max_error_rate "
                f"{self.max_error_rate:g}. To continue regardless, raise the flag or set "
                "--reward.on_error drop, which leaves failed episodes out. "
                f"The first error:\n{errors[0]}"
            )
