"""Dynamic filtering: prompts that teach nothing are replaced before the step.     Yu et al. 2025, section 3.2, arXiv:2503.14476"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from openrlhf.observability.metrics import Mean
from openrlhf.rollout.generator import Group
from openrlhf.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class DynamicFilter:
    """Keeps a prompt if low < mean score of its finished samples < high.

    Every prompt of a step beyond the first ones is drawn in place of a rejected prompt. So the prompts drawn are the fewest
    with enough kept among them, whichever finishes first; and without over-sampling, no prompt is waiting when a step is
    complete. A resumed run needs to know how many prompts were drawn, and nothing else.
    """

    low: float
    high: float

    def rejects(self, group: Sequence[Trajectory]) -> bool:
        """Whether the samples of a prompt teach nothing."""
        scores = [t.score for t in group if not t.failed and t.score is not None]
        return not (scores and self.low < fmean(scores) < self.high)

    def marked(self, group: Group) -> Group:
        """The group, its samples marked if it is rejected: their text and numbers are shown, their tokens are let go."""
        return [thrown_away(t) for t in group] if self.rejects(group) else group


def thrown_away(trajectory: Trajectory) -> Trajectory:
    """An episode of a rejected prompt."""
    return replace(trajectory, filtered=True, tokens=[], action_mask=[], rollout_logprobs=[])


def pass_rate(trajectories: Sequence[Trajectory]) -> Mean:
    """Prompts kept of those sampled, percent."""
    kept = {t.prompt.index: not t.filtered for t in trajectories}
    return Mean(100.0 * sum(kept.values()), len(kept))
