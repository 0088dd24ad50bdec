"""Limits on how far generation may run ahead of training.

The functions are pure, so that tests can simulate runs without engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class Held:
    """A prompt's samples, from the start of generation until a step trains on them.

    `version` is the weight version at the start of generation.
    """

    version: int
    finished: bool = False
    filtered: bool = False  # True for rejected prompts, which are logged but not counted in a batch


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Limits on prompts in progress and on sample age.

    In addition to the batch in training, at most `queue` batches of `batch` prompts may be in
    generation or waiting. No sample is used to train weights that are more than `staleness`
    versions newer than the weights that started the sample. With `queue` 1, training is one step
    off-policy.
    """

    batch: int
    queue: int
    staleness: int

    def room(self, held: Sequence[Held]) -> int:
        """Return the number of prompts that may start.

        `held` lists, in order, all prompts that have started but have not been trained on yet.
        """
        ahead = sum(not each.filtered for each in held)
        most = min(self.queue, self.staleness) * self.batch
        return max(0, most - ahead)

    def next_step(
        self, held: Sequence[Held], version: int, *, last: bool = False
    ) -> list[int] | None:
        """Return the indices into `held` of the next step's prompts, or None if the step has to
        wait.

        The step trains the weights of version `version` on the oldest finished prompts. The
        remaining prompts follow in order: the prompt at place p among them trains the weights of
        version `version` + 1 + p // `batch`. If a remaining prompt would then be too old, the step
        waits for the unfinished prompts. A rejected prompt belongs to the same step as the prompt
        before it. If `last` is true, no more prompts will start, so the step may be smaller.
        """
        kept: list[int] = []
        left: list[Held] = []  # prompts for later steps
        for place, each in enumerate(held):
            if each.filtered:
                continue
            if each.finished and len(kept) < self.batch:
                kept.append(place)
            else:
                left.append(each)
        is_short = len(kept) < self.batch
        if is_short and (left or not last):
            return None
        if self._would_be_too_old(left, version):
            return None
        end = len(held)
        if kept and left:
            end = kept[-1]
        rejected = [place for place, each in enumerate(held[:end]) if each.filtered]
        return sorted({*kept, *rejected})

    def _would_be_too_old(self, left: Sequence[Held], version: int) -> bool:
        """Return whether the step must wait for an unfinished prompt that would become too old."""
        if all(each.finished for each in left):
            return False
        for place, each in enumerate(left):
            if each.version + self.staleness <= version + place // self.batch:
                return True
        return False
