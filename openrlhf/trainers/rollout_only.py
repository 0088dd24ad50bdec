"""Runs that only generate and score samples (--rollout.only)."""

import time
from dataclasses import dataclass

from openrlhf.observability.metrics import Last, values
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.outcome import Outcome
from openrlhf.trainers.ppo import step_metrics
from openrlhf.trainers.sources import Source


@dataclass(eq=False, repr=False)
class RolloutOnly:
    """Generates samples, scores them and logs metrics at every step, without training.

    The experience maker has only the reward stages.
    """

    source: Source
    maker: ExperienceMaker
    recorder: Recorder
    step: int = 0  # number of finished steps

    def fit(self) -> None:
        """Process all prompts. Raises RewardErrors if too many episodes of a step have failed."""
        self.recorder.display.begin(self.source.total_steps)
        outcome = Outcome(dynamic_filter=self.source.dynamic_filter)
        began = time.perf_counter()
        for trajectories in self.source:
            batch = self.maker.annotate(trajectories)
            outcome.see(batch)
            self.recorder.samples(self.step + 1, batch.trajectories)
            self.source.errors.check(batch.trajectories)
            if batch.is_filtered:
                continue
            metrics = step_metrics(self.source, batch)
            seconds = time.perf_counter() - began
            metrics["timing/generation"] = Last(seconds)
            metrics["timing/step_total"] = Last(seconds)
            metrics["timing/tokens_per_second"] = Last(batch.experience.num_tokens / seconds)
            self.step += 1
            self.recorder.step(self.step, values(metrics))
            began = time.perf_counter()
        if not self.step:
            self.recorder.display.note(
                f"The run ended without a step: no episode was kept.{outcome.rejections}"
            )
