"""Dynamic filtering: prompts without a learning signal are replaced before the step.

DAPO, section 3.2, arXiv:2503.14476
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.metrics import Mean


@dataclass(frozen=True)
class DynamicFilter:
    """Keeps a prompt if low < mean score of its finished samples < high.

    A step starts with as many prompts as it needs, and each rejected prompt is replaced by the next
    prompt in order. A step therefore draws no more prompts than it needs to fill its batch,
    regardless of the order in which the prompts finish. Without over-sampling, no prompt is waiting
    when a step is complete, so a resumed run needs only the number of drawn prompts.
    """

    low: float
    high: float

    def rejects(self, group: Sequence[Trajectory]) -> bool:
        """Return whether to reject the samples of a prompt."""
        scores: list[float] = []
        for trajectory in group:
            if not trajectory.failed and trajectory.score is not None:
                scores.append(trajectory.score)
        return not scores or not self.low < fmean(scores) < self.high


def thrown_away(trajectory: Trajectory) -> Trajectory:
    """Return an episode of a rejected group, which is logged without its tokens."""
    return replace(
        trajectory,
        filtered=True,
        tokens=[],
        action_mask=[],
        rollout_logprobs=[],
        columns={},
        earlier=(),
    )


def pass_rate(trajectories: Sequence[Trajectory]) -> Mean:
    """Return the percentage of the sampled prompts that were kept."""
    kept: dict[int, bool] = {}
    for trajectory in trajectories:
        kept[trajectory.prompt.index] = not trajectory.filtered
    return Mean(100.0 * sum(kept.values()), len(kept))
