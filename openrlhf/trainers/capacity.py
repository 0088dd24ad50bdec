"""How far generation may run ahead of training. Pure: the asynchronous source and the simulator use
the same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class Held:
    """The samples of a prompt, from their start until a step trains on them. `version`: of the
    weights at the start.
    """

    version: int
    finished: bool = False
    filtered: bool = False  # rejected: logged with a step, and counted nowhere


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """At most `queue` batches of `batch` prompts are in generation or waiting, besides the batch in
    training.

    No sample is trained on by weights more than `staleness` versions newer than the weights that
    began it. With `queue` 1 training is one step off-policy.
    """

    batch: int
    queue: int
    staleness: int

    def room(self, held: Sequence[Held]) -> int:
        """The number of prompts that may start. `held`: all that have started and not been trained
        on, in order.
        """
        ahead = sum(not each.filtered for each in held)
        return max(0, min(self.queue, self.staleness) * self.batch - ahead)

    def step(self, held: Sequence[Held], version: int, *, last: bool = False) -> list[int] | None:
        """The places in `held` of the next step, which trains weights `version`; None if the step
        has to wait.

        A step has the oldest finished prompts. It waits for older ones if these would become too
        old otherwise: after each step, the prompts that are left must be young enough for the steps
        that train on them in order. Rejected prompts go with the step of the prompts before them.
        `last`: no prompt will start any more, so that the step may be short.
        """
        kept = [place for place, each in enumerate(held) if each.finished and not each.filtered][
            : self.batch
        ]
        left = [each for place, each in enumerate(held) if not each.filtered and place not in kept]
        if len(kept) < self.batch and not (last and not left):
            return None
        waits = not all(each.finished for each in left)
        if waits and any(
            each.version + self.staleness <= version + place // self.batch
            for place, each in enumerate(left)
        ):
            return None
        end = kept[-1] if kept and left else len(held)
        return sorted({*kept, *(place for place, each in enumerate(held[:end]) if each.filtered)})
