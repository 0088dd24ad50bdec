"""Counts of a run's episodes by outcome.

The run's last message shows them if the run used up its prompts early or never updated the model.
"""

from dataclasses import dataclass, field

from openrlhf.config.flags import UserError
from openrlhf.trainers.experience_maker import StepBatch
from openrlhf.trainers.filtering import DynamicFilter


class NothingLearned(UserError, RuntimeError):
    """A run ended without an optimizer step. The message explains what happened to the episodes."""


@dataclass(kw_only=True)
class Outcome:
    """Counts of the episodes of a run since it started or resumed.

    `keep` is the run's dynamic filter.
    """

    keep: DynamicFilter | None
    updates: int = 0  # number of batches that were trained on
    episodes: int = 0
    failed: int = 0
    empty: int = 0  # finished episodes without sampled tokens
    alone: int = 0  # finished episodes without another sample of the prompt to compare with
    truncated: int = 0  # trainable episodes that were truncated
    first_error: str | None = None
    # Scores of each prompt that the filter rejected, by prompt index.
    scores: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def see(self, batch: StepBatch) -> None:
        """Count the episodes of a batch."""
        used = {(each.prompt.index, each.sample_index) for each in batch.kept}
        for trajectory in batch.trajectories:
            self.episodes += 1
            if trajectory.failed:
                self.failed += 1
                self.first_error = self.first_error or trajectory.error
            elif trajectory.filtered:
                scores = self.scores.setdefault(trajectory.prompt.index, [])
                if trajectory.score is not None:
                    scores.append(trajectory.score)
            elif not trajectory.num_actions:
                self.empty += 1
            elif (trajectory.prompt.index, trajectory.sample_index) not in used:
                self.alone += 1
            else:
                self.truncated += trajectory.truncated

    @property
    def rejections(self) -> str:
        """A sentence about the prompts that the dynamic filter rejected, or an empty string."""
        if not self.keep or not self.scores:
            return ""
        means = [sum(scores) / len(scores) for scores in self.scores.values() if scores]
        seen = ""
        if means:
            seen = f" ({min(means):.4g} to {max(means):.4g})"
        return (
            f" --algo.dynamic_filtering_range {self.keep.low:g} {self.keep.high:g} rejected "
            f"{len(self.scores)} prompts because of their mean scores{seen}."
        )

    def check(self) -> None:
        """Raise NothingLearned if no batch was trained on."""
        if self.updates:
            return
        left_out: list[str] = []
        if self.failed:
            left_out.append(f"{self.failed} failed")
        if self.empty:
            left_out.append(f"{self.empty} have no sampled tokens")
        if self.alone:
            left_out.append(
                f"{self.alone} had no other finished sample of the same prompt to compare with"
            )
        if self.truncated:
            left_out.append(f"{self.truncated} were truncated (--algo.loss.mask_truncated)")
        counts = ""
        if left_out:
            counts = f" Of {self.episodes} episodes, {', '.join(left_out)}."
        error = ""
        if self.first_error:
            error = f" First error:\n{self.first_error}"
        raise NothingLearned(
            "the run ended without an optimizer step. The weights are unchanged, so no model is "
            f"written.{counts}{self.rejections}{error}"
        )
