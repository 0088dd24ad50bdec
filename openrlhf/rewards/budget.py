"""How many failures end the run."""

from collections.abc import Sequence

from openrlhf.config.flags import UserError
from openrlhf.config.rollout import RewardConfig
from openrlhf.trajectory import Trajectory


class RewardErrors(UserError, RuntimeError):
    """Too many episodes of a batch failed; the message holds the first error."""


class ErrorBudget:
    """The fraction of a batch's episodes that may fail: --reward.max_error_rate; with
    --reward.on_error drop, all.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self.max_error_rate = 1.0 if reward.on_error == "drop" else reward.max_error_rate

    def exceeded_by(self, failed: int, *, of: int) -> bool:
        """Whether this number of failures is too large."""
        return failed > self.max_error_rate * of

    def check(self, trajectories: Sequence[Trajectory], *, of: str = "episodes") -> None:
        """Raise RewardErrors, with the first error, if too many have failed. `of` names them in the
        message.
        """
        failed = [trajectory.error for trajectory in trajectories if trajectory.failed]
        self.check_errors(failed, of=len(trajectories), what=f"{of} failed")

    def check_errors(self, errors: Sequence[str | None], *, of: int, what: str) -> None:
        """Raise RewardErrors, with the first error, if there are too many errors. `what` says what
        happened: "episodes failed".
        """
        if self.exceeded_by(len(errors), of=of):
            raise RewardErrors(
                f"{len(errors)} of {of} {what}, a larger fraction than --reward.max_error_rate {self.max_error_rate:g}. "
                "To go on all the same, raise it or set --reward.on_error drop, which leaves failures out. "
                f"The first error:\n{errors[0]}"
            )
