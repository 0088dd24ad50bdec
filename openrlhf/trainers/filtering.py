"""Dynamic filtering: prompts that teach nothing are replaced before the step.     Yu et al. 2025, section 3.2, arXiv:2503.14476"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from statistics import fmean

from openrlhf.observability.metrics import Mean
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rollout.generator import Rejects
from openrlhf.trajectory import Prompt, Trajectory

logger = logging.getLogger(__name__)
MOST_DRAWN = 4  # prompts drawn between two looks at the error budget, per group that is missing

# (prompts, groups, rejects): scored samples of the prompts, which are taken until so many groups are not rejected.
Generate = Callable[[Iterator[Prompt], int, Rejects], list[Trajectory]]


@dataclass(frozen=True, kw_only=True)
class DynamicFilter:
    """Keeps a prompt if low < mean score of its finished samples < high.

    Every prompt of a step beyond the first ones is drawn in place of a rejected one. So the prompts drawn are the fewest
    with enough kept among them, whichever finishes first; and without over-sampling, none of them is waiting when a
    step is complete. A resumed run needs to know how many were drawn, and nothing else.
    """

    low: float
    high: float
    errors: ErrorBudget

    def rejects(self, group: Sequence[Trajectory]) -> bool:
        """Whether the samples of a prompt teach nothing. One whose scores are still to come from a reward worker may."""
        scores = [t.score for t in group if not t.failed]
        known = [score for score in scores if score is not None]
        return len(known) == len(scores) and not (known and self.low < fmean(known) < self.high)

    def fill(self, groups: int, prompts: Iterator[Prompt], generate: Generate) -> list[Trajectory]:
        """All samples of a step with `groups` groups kept, or fewer where the prompts end; those of the others are marked.

        Ends early where too many episodes have failed, for the loop to say so: a reward that always fails would otherwise
        use up the prompts.
        """
        tried: list[Trajectory] = []
        missing = groups
        while missing and not self.errors.exceeded(tried):
            fresh = generate(islice(prompts, MOST_DRAWN * missing), missing, self.rejects)
            if not fresh:
                break
            for group in by_prompt(fresh):
                rejected = self.rejects(group)
                missing -= not rejected
                tried += [thrown_away(t) for t in group] if rejected else group
        if tried and missing == groups and not self.errors.exceeded(tried):
            logger.warning(
                "The last %d prompts of an episode teach nothing: none has a mean score between %g and %g (--algo.dynamic_filtering_range).",
                len(list(by_prompt(tried))), self.low, self.high,
            )  # fmt: skip
        return tried


def by_prompt(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """The samples of each prompt."""
    for _, group in groupby(trajectories, key=lambda t: t.prompt.index):
        yield list(group)


def thrown_away(trajectory: Trajectory) -> Trajectory:
    """An episode of a rejected prompt: its text and numbers are shown, its tokens are let go."""
    return replace(trajectory, filtered=True, tokens=[], action_mask=[], rollout_logprobs=[])


def pass_rate(trajectories: Iterable[Trajectory]) -> Mean:
    """Prompts kept of those tried, percent."""
    kept = [not group[0].filtered for group in by_prompt(trajectories)]
    return Mean(100.0 * sum(kept), len(kept))
