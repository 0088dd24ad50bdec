"""Dynamic filtering: prompts that teach nothing are replaced before the step.

DAPO, section 3.2, arXiv:2503.14476
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.metrics import Mean
from openrlhf.rollout.generator import Group


@dataclass(frozen=True)
class DynamicFilter:
    """Keeps a prompt if low < mean score of its finished samples < high.

    A step begins with as many prompts as it needs, and each rejected prompt is replaced by the next
    one. So a step draws the fewest prompts that give enough kept ones, whichever finishes first.
    Without over-sampling, no prompt waits when a step is complete, so a resumed run needs only the
    number of prompts drawn.
    """

    low: float
    high: float

    def rejects(self, group: Sequence[Trajectory]) -> bool:
        """Return whether the samples of a prompt teach nothing."""
        scores: list[float] = []
        for trajectory in group:
            if not trajectory.failed and trajectory.score is not None:
                scores.append(trajectory.score)
        return not scores or not self.low < fmean(scores) < self.high

    def marked(self, group: Group) -> Group:
        """Return the group; if it is rejected, marked as filtered.

        Samples of a rejected group are logged, but lose their tokens.
        """
        if not self.rejects(group):
            return group
        return [thrown_away(trajectory) for trajectory in group]


def thrown_away(trajectory: Trajectory) -> Trajectory:
    """Return an episode of a rejected prompt: marked as filtered, and without its tokens."""
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
