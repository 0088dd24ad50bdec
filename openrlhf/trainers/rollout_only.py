"""--rollout.only: the steps of a run without their training."""

from __future__ import annotations

import time

from openrlhf.observability.metrics import Last, values
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.ppo import step_metrics
from openrlhf.trainers.sources import SyncSource


class RolloutOnly:
    """Has every step generated and rewarded, and measures it. The maker has no stages but the rewards."""

    def __init__(self, source: SyncSource, maker: ExperienceMaker, recorder: Recorder, errors: ErrorBudget) -> None:
        self.source, self.maker, self.recorder, self.errors = source, maker, recorder, errors
        self.step = 0

    def fit(self) -> None:
        """Go through the prompts. Raises RewardErrors if too many episodes of a step have failed."""
        self.recorder.display.begin(self.source.total_steps)
        began = time.perf_counter()
        for trajectories in self.source:
            batch = self.maker.annotate(trajectories)
            self.recorder.samples(self.step + 1, batch.trajectories)
            self.errors.check(batch.trajectories)
            if all(t.filtered for t in trajectories):  # what is left of an epoch makes no step
                continue
            metrics, seconds = step_metrics(self.source, batch), time.perf_counter() - began
            metrics |= {name: Last(seconds) for name in ("timing/generation", "timing/step_total")}
            metrics["timing/tokens_per_second"] = Last(sum(len(t.tokens) for t in batch.kept) / seconds)
            self.step += 1
            self.recorder.step(self.step, values(metrics))
            began = time.perf_counter()
