"""The best evaluation of a run: which checkpoint is kept for it, and when --eval.patience ends the wait for a better one."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from openrlhf.checkpoints import Checkpoint, CheckpointManager, RunState
from openrlhf.checkpoints.manifest import is_minimised

logger = logging.getLogger(__name__)


class BestMetric:
    """The best value of one evaluation metric so far, and how many evaluations in a row were not better.

    `key` empty locks on to the first metric by name that ends in `ending`; `none` disables.
    """

    def __init__(self, key: str, *, ending: str, patience: int | None = None) -> None:
        self.key, self.ending, self.patience = key.removeprefix("eval/"), ending, patience
        self.value: float | None = None
        self.step: int | None = None  # of the best
        self.waited = 0  # evaluations since then
        self.evaluated_at = -1  # the step of the last evaluation
        self.last: float | None = None  # what it had

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take note of an evaluation of the weights after `step`; True when its value is strictly better than all before.

        One without the metric counts for nothing. A value that is not finite is no best.
        """
        self.evaluated_at, self.last = step, None
        if self.key == "none":
            return False
        plain = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self.key = self.key or min((name for name in plain if name.endswith(self.ending)), default="")
        self.last = value = plain.get(self.key)
        if value is None:
            if os.environ.get("RANK", "0") == "0":  # offline, every process of the launcher takes note
                wanted = self.key or f"*{self.ending}"
                logger.warning(
                    "--ckpt.best_metric_key %s is no metric of the evaluation: %s.", wanted, ", ".join(plain)
                )
            return False
        if not self._is_best(value):
            self.waited += 1
            return False
        self.value, self.step, self.waited = value, step, 0
        return True

    def _is_best(self, value: float) -> bool:
        if self.value is None or not math.isfinite(value):
            return math.isfinite(value)
        return value < self.value if is_minimised(self.key) else value > self.value

    def value_of(self, step: int) -> float | None:
        """What the weights after `step` were measured to have, if the last evaluation was of them."""
        return self.last if self.evaluated_at == step else None

    @property
    def exhausted(self) -> bool:
        """Whether --eval.patience is: the run ends."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def followed(self) -> str | None:
        """The metric, once it is known, if there is one."""
        return None if self.key in ("", "none") else self.key

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: fields of `RunState`."""
        return {
            "best_metric_key": self.followed,
            "best_metric_value": self.value,
            "best_step": self.step,
            "evaluations_since_best": self.waited,
        }

    def restore(self, state: RunState) -> None:
        """Continue with a checkpoint's best, if it is of the same metric."""
        if state.best_metric_key and self.key in ("", state.best_metric_key):
            self.key, self.value = state.best_metric_key, state.best_metric_value
            self.step, self.waited = state.best_step, state.evaluations_since_best

    def to_export(self, step: int, checkpoints: CheckpointManager, say: Callable[[str], None]) -> Checkpoint | None:
        """With --eval.patience, what the best evaluation was of, to be loaded and exported; None where the weights after `step` are.

        Says which are, why, and whether it was the patience that ended the run.
        """
        if self.patience is None:
            return None
        ended = f"--eval.patience {self.patience} ends the run after step {step}. " if self.exhausted else ""
        if self.value is None:
            say(f"{ended}The last weights are exported: no evaluation had a value of {self.followed or self.ending}.")
            return None
        best = f"the weights of step {self.step}, with the best {self.key} of all evaluations, {self.value:.6g}"
        found = checkpoints.find(self.step, best=True) if self.step not in (None, step) else None
        if found or self.step == step:
            say(f"{ended}Exported are {best}.")
        else:
            say(
                f"{ended}The last weights are exported: {best}, are not, or not whole, in --ckpt.path {checkpoints.root}."
            )
        return found
