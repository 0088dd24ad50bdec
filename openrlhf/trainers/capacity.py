"""How far generation may run ahead of training.

Pure: the asynchronous source and the simulator use the same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class Held:
    """The samples of a prompt, from their start until a step trains on them.

    `version` is that of the weights at the start.
    """

    version: int
    finished: bool = False
    filtered: bool = False  # rejected: logged with a step, and counted nowhere


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """At most `queue` batches of `batch` prompts are being generated or waiting, besides the batch
    in training.

    No sample is trained on by weights more than `staleness` versions newer than the weights that
    began it. With `queue` 1, training is one step off-policy.
    """

    batch: int
    queue: int
    staleness: int

    def room(self, held: Sequence[Held]) -> int:
        """Return the number of prompts that may start.

        `held` are all prompts that have started and not been trained on, in order.
        """
        ahead = sum(not each.filtered for each in held)
        most = min(self.queue, self.staleness) * self.batch
        return max(0, most - ahead)

    def step(self, held: Sequence[Held], version: int, *, last: bool = False) -> list[int] | None:
        """Return the places in `held` of the next step, or None if the step has to wait.

        The step trains weights `version` on the oldest finished prompts. It waits for older ones
        if these would otherwise become too old: after each step, the prompts that are left must be
        young enough for the steps that train on them in order. Rejected prompts go with the step
        of the prompts before them. `last`: no prompt will start any more, so that the step may be
        short.
        """
        kept: list[int] = []
        left: list[Held] = []  # for later steps
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
        """Return whether a prompt that later steps train on is unfinished and runs out of time."""
        if all(each.finished for each in left):
            return False
        for place, each in enumerate(left):
            if each.version + self.staleness <= version + place // self.batch:
                return True
        return False
