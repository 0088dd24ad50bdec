"""The best evaluation of a run: its checkpoint is kept, and --eval.patience may end the run after
it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, RunState, is_minimised
from openrlhf.config.flags import notice


class BestMetric:
    """The best value of one evaluation metric so far, and the number of evaluations since then.

    An empty `key` follows the first metric, by name, that ends in `ending`. The key `none` follows
    no metric.
    """

    def __init__(self, key: str, *, ending: str, patience: int | None = None) -> None:
        self.key, self.ending, self.patience = key.removeprefix("eval/"), ending, patience
        self.value: float | None = None
        self.step: int | None = None  # of the best
        self.waited = 0  # evaluations since then
        self.evaluated_at = -1  # the step of the last evaluation
        self.last: float | None = None  # the value of the last evaluation

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Note an evaluation of the weights after `step`. True if its value is better than every
        earlier value.

        An evaluation without the metric is ignored. A value that is not finite is never the best.
        """
        self.evaluated_at, self.last = step, None
        if self.key == "none":
            return False
        plain = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self.key = self.key or min(
            (name for name in plain if name.endswith(self.ending)), default=""
        )
        self.last = value = plain.get(self.key)
        if value is None:
            wanted = self.key or f"*{self.ending}"
            notice(
                f"--ckpt.best_metric_key {wanted} is no metric of the evaluation: {', '.join(plain)}."
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
        """The value of the weights after `step`, if the last evaluation measured these weights."""
        return self.last if self.evaluated_at == step else None

    @property
    def exhausted(self) -> bool:
        """Whether --eval.patience is used up, so that the run ends."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def followed(self) -> str | None:
        """The name of the metric; None if the name is not known yet, or no metric is followed."""
        return None if self.key in ("", "none") else self.key

    def state(self) -> dict[str, Any]:
        """The fields of `RunState` for a checkpoint."""
        return {
            "best_metric_key": self.followed,
            "best_metric_value": self.value,
            "best_step": self.step,
            "evaluations_since_best": self.waited,
            "evaluated_at": self.evaluated_at,
        }

    def restore(self, state: RunState) -> None:
        """Continue with the best value of a checkpoint, if it has the same metric."""
        self.evaluated_at = state.evaluated_at
        if state.best_metric_key and self.key in ("", state.best_metric_key):
            self.key, self.value = state.best_metric_key, state.best_metric_value
            self.step, self.waited = state.best_step, state.evaluations_since_best

    def to_export(
        self, step: int, checkpoints: CheckpointManager, say: Callable[[str], None]
    ) -> Checkpoint | None:
        """With --eval.patience, the checkpoint of the best evaluation; None to export the weights
        after `step`.

        `say` gets a sentence: which weights are exported, why, and whether the patience ended the
        run.
        """
        if self.patience is None:
            return None
        ended = (
            f"--eval.patience {self.patience} ends the run after step {step}. "
            if self.exhausted
            else ""
        )
        if self.value is None:
            say(
                f"{ended}The export has the last weights: no evaluation had a value of {self.followed or self.ending}."
            )
            return None
        best = f"the weights of step {self.step}, with the best {self.key} of all evaluations, {self.value:.6g}"
        found = checkpoints.find(self.step, best=True) if self.step not in (None, step) else None
        if found or self.step == step:
            say(f"{ended}The export has {best}.")
        else:
            say(
                f"{ended}The export has the last weights: --ckpt.path {checkpoints.root} has no complete checkpoint of "
                f"{best}."
            )
        return found
