"""Limits the fraction of failed episodes in a batch. A run stops if a batch exceeds the limit."""

from collections.abc import Sequence

from openrlhf.config.flags import UserError
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.trajectory import Trajectory


class RewardErrors(UserError, RuntimeError):
    """Error for too many failed episodes in one batch. The message contains the first error."""


class ErrorBudget:
    """The maximum fraction of a batch's episodes that may fail.

    The maximum is --reward.max_error_rate, or 1 with --reward.on_error drop.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self.max_error_rate = reward.max_error_rate
        if reward.on_error == "drop":
            self.max_error_rate = 1.0

    def exceeded_by(self, failed: int, *, of: int) -> bool:
        """Return whether the limit is exceeded if `failed` of `of` episodes failed."""
        return failed > self.max_error_rate * of

    def check(self, trajectories: Sequence[Trajectory], *, of: str = "episodes") -> None:
        """Raise RewardErrors with the first error if too many trajectories failed.

        The message uses `of` as the noun for the trajectories.
        """
        failed = [trajectory.error for trajectory in trajectories if trajectory.failed]
        self.check_errors(failed, of=len(trajectories), what=f"{of} failed")

    def check_errors(self, errors: Sequence[str | None], *, of: int, what: str) -> None:
        """Raise RewardErrors with the first error if there are too many errors.

        `what` describes the errors in the message, for example "episodes failed".
        """
        if self.exceeded_by(len(errors), of=of):
            raise RewardErrors(
                f"{len(errors)} of {of} {what}, more than --reward.max_error_rate "
                f"{self.max_error_rate:g} allows. To continue anyway, raise this limit or set "
                "--reward.on_error drop, which drops failed episodes. "
                f"First error:\n{errors[0]}"
            )
