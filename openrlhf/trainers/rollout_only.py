"""--rollout.only: the steps of a run without their training."""

from __future__ import annotations

import time

from openrlhf.observability.metrics import Last, values
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.trainers.ppo import step_metrics, trainable
from openrlhf.trainers.sources import SyncSource


class RolloutOnly:
    """Has every step generated and rewarded, and measures it. `needs_groups` as in training, where a lone sample teaches nothing."""

    def __init__(self, source: SyncSource, recorder: Recorder, errors: ErrorBudget, *, needs_groups: bool) -> None:
        self.source, self.recorder, self.errors, self.needs_groups = source, recorder, errors, needs_groups
        self.step = 0

    def fit(self) -> None:
        """Go through the prompts. Raises RewardErrors when too much has failed."""
        self.recorder.display.begin(self.source.total_steps)
        began = time.perf_counter()
        for trajectories in self.source:
            self.recorder.samples(self.step + 1, trajectories)
            self.errors.check(trajectories)
            if all(t.filtered for t in trajectories):  # what was left of an episode makes no step
                continue
            kept = trainable(trajectories, needs_groups=self.needs_groups)
            metrics = step_metrics(self.source, trajectories, kept)
            seconds = time.perf_counter() - began
            metrics |= {name: Last(seconds) for name in ("timing/generation", "timing/step_total")}
            metrics["timing/tokens_per_second"] = Last(sum(len(t.tokens) for t in kept) / seconds)
            self.step += 1
            self.recorder.step(self.step, values(metrics))
            began = time.perf_counter()
