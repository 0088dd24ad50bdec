"""Tracks a run's best evaluation, to keep its checkpoint and to stop early (--eval.patience)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, RunState, is_minimised
from openrlhf.reporting import notice


@dataclass(eq=False, repr=False)
class BestMetric:
    """The best value of an evaluation metric so far, and the number of evaluations since then.

    An empty `key` selects the alphabetically first metric whose name ends in `ending`. The key
    `none` disables tracking.
    """

    key: str
    ending: str
    patience: int | None
    value: float | None = None
    step: int | None = None  # step of the best value
    waited: int = 0  # number of evaluations since the best value
    evaluated_at: int = -1  # step of the last evaluation
    last: float | None = None  # value in the last evaluation

    def __post_init__(self) -> None:
        self.key = self.key.removeprefix("eval/")

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation of the weights after `step`.

        Returns whether the evaluation's value is better than all earlier values. An evaluation that
        lacks the metric is ignored. A non-finite value is never the best.
        """
        self.evaluated_at = step
        self.last = None
        if self.key == "none":
            return False
        plain = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        if not self.key:
            self.key = min((name for name in plain if name.endswith(self.ending)), default="")
        self.last = plain.get(self.key)
        if self.last is None:
            notice(
                f"--ckpt.best_metric_key {self.key or '*' + self.ending} is not a metric of this "
                f"evaluation. Its metrics: {', '.join(plain)}."
            )
            return False
        if not self._is_best(self.last):
            self.waited += 1
            return False
        self.value = self.last
        self.step = step
        self.waited = 0
        return True

    def _is_best(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        if is_minimised(self.key):
            return value < self.value
        return value > self.value

    def value_of(self, step: int) -> float | None:
        """Return the value after `step`, or None if the last evaluation was at a different step."""
        if self.evaluated_at != step:
            return None
        return self.last

    @property
    def exhausted(self) -> bool:
        """True if --eval.patience is exhausted, which ends the run."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def followed(self) -> str | None:
        """The name of the tracked metric, or None if unknown so far or if tracking is disabled."""
        if self.key in ("", "none"):
            return None
        return self.key

    def state(self) -> dict[str, Any]:
        """Return the fields of `RunState` for a checkpoint."""
        return {
            "best_metric_key": self.followed,
            "best_metric_value": self.value,
            "best_step": self.step,
            "evaluations_since_best": self.waited,
            "evaluated_at": self.evaluated_at,
        }

    def restore(self, state: RunState) -> None:
        """Continue with the best value from a checkpoint that tracked the same metric."""
        self.evaluated_at = state.evaluated_at
        if state.best_metric_key and self.key in ("", state.best_metric_key):
            self.key = state.best_metric_key
            self.value = state.best_metric_value
            self.step = state.best_step
            self.waited = state.evaluations_since_best

    def to_export(
        self, step: int, checkpoints: CheckpointManager, say: Callable[[str], None]
    ) -> Checkpoint | None:
        """Return the best evaluation's checkpoint, or None to export the weights after `step`.

        Without --eval.patience, the last weights are exported. `say` receives a message stating
        which weights are exported, why, and whether --eval.patience ended the run.
        """
        if self.patience is None:
            return None
        exported = step
        best = f"no evaluation had a finite {self.followed or self.ending}"
        if self.value is not None:
            best = (
                f"the best {self.key} of all evaluations is {self.value:.6g}, at step {self.step}"
            )
        found = None
        if self.step not in (None, step):
            found = checkpoints.find(self.step, best=True)
            if found:
                exported = self.step
            else:
                best += f", which has no complete checkpoint in --ckpt.path {checkpoints.root}"
        ended = ""
        if self.exhausted:
            ended = f"--eval.patience {self.patience} ends the run after step {step}. "
        say(f"{ended}The export contains the weights of step {exported}: {best}.")
        return found
