"""Counts of a run's episodes by outcome.

The counts appear in the run's last message if the run used up its prompts early or never updated
the model.
"""

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from openrlhf.config.flags import UserError
from openrlhf.core.trajectory import Exclusion
from openrlhf.trainers.experience_maker import StepBatch
from openrlhf.trainers.filtering import DynamicFilter

# Ends of the sentence "3 episodes …". `Outcome.rejections` describes the filtered episodes.
UNUSED = {
    Exclusion.FAILED: "failed",
    Exclusion.EMPTY: "have no sampled tokens",
    Exclusion.ALONE: "had no other finished sample of the same prompt to compare with",
}
TRUNCATED = "were truncated (--algo.loss.mask_truncated)"


class NothingLearned(UserError, RuntimeError):
    """Error for a run without an optimizer step; explains what happened to the episodes."""


@dataclass(kw_only=True)
class Outcome:
    """Counts of a run's episodes since the run started or resumed."""

    dynamic_filter: DynamicFilter | None
    updates: int = 0  # number of batches that were trained on
    episodes: int = 0
    unused: Counter[str] = field(default_factory=Counter[str])  # number of episodes by reason
    first_error: str | None = None
    # Scores of each prompt rejected by the filter, keyed by prompt index.
    rejected: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def see(self, batch: StepBatch) -> None:
        """Count the episodes of a batch."""
        for trajectory, exclusion in zip(batch.trajectories, batch.exclusions, strict=True):
            self.episodes += 1
            if exclusion is Exclusion.FAILED:
                self.first_error = self.first_error or trajectory.error
            if exclusion is Exclusion.FILTERED:
                scores = self.rejected.setdefault(trajectory.prompt.index, [])
                if trajectory.score is not None:
                    scores.append(trajectory.score)
            elif exclusion is not None:
                self.unused[UNUSED[exclusion]] += 1
            elif trajectory.truncated:
                self.unused[TRUNCATED] += 1

    @property
    def rejections(self) -> str:
        """A sentence about the prompts rejected by the dynamic filter, or an empty string."""
        dynamic_filter = self.dynamic_filter
        if not dynamic_filter or not self.rejected:
            return ""
        means = [fmean(scores) for scores in self.rejected.values() if scores]
        seen = ""
        if means:
            seen = f" ({min(means):.4g} to {max(means):.4g})"
        return (
            f" --algo.dynamic_filtering_range {dynamic_filter.low:g} {dynamic_filter.high:g} "
            f"rejected {len(self.rejected)} prompts because of their mean scores{seen}."
        )

    def check(self) -> None:
        """Raise NothingLearned if no batch was trained on."""
        if self.updates:
            return
        message = (
            "the run ended without an optimizer step. The weights are unchanged, so no model is "
            "written."
        )
        if self.unused:
            counts = [f"{count} {reason}" for reason, count in self.unused.items()]
            message += f" Of {self.episodes} episodes, {', '.join(counts)}."
        message += self.rejections
        if self.first_error:
            message += f" First error:\n{self.first_error}"
        raise NothingLearned(message)
