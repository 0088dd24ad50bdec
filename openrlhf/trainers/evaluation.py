"""The evaluations of a run of RL: when one is due, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass

from openrlhf.config.learning import RLFlags
from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rollout.episode_metrics import evaluation_metrics
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.clock import Clock

Evaluate = Callable[[int], list[Trajectory]]  # with the weights after that step


@dataclass(kw_only=True)
class Evaluation:
    """Measures the published weights on the held-out prompts, and follows the best value.

    `play` is None if the run has no held-out prompts.
    """

    play: Evaluate | None
    best: BestMetric
    errors: ErrorBudget
    recorder: Recorder
    clock: Clock
    config: RLFlags

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return whether the weights after `step` are evaluated; those of the last step always are.

        An evaluation comes before the checkpoint of its step.
        """
        every = self.config.eval.steps
        return every > 0 and (last or step % every == 0)

    def is_missing(self, step: int) -> bool:
        """Return whether evaluations are on, and the weights after `step` have none yet."""
        return self.config.eval.steps > 0 and self.best.evaluated_at < step

    def is_due_at_start(self, step: int, *, last: bool) -> bool:
        """Return whether the run begins with an evaluation.

        It does with --eval.at_start, and where a run before it ended within an evaluation.
        """
        if step == 0:
            return self.config.eval.at_start and self.best.step is None
        return self.is_due(step, last=last) and self.is_missing(step)

    def sample(self, step: int) -> list[Trajectory] | None:
        """Return the episodes of the held-out prompts, or None if there are no such prompts."""
        if self.play is None:
            return None
        with self.clock.part("evaluation"):
            return self.play(step)

    def judge(self, step: int, trajectories: list[Trajectory]) -> bool:
        """Log pass@k and the other metrics. Return whether their weights are a new best to save.

        Raises RewardErrors if too many episodes have failed: such an evaluation is logged, and is
        never the best.
        """
        metrics = evaluation_metrics(trajectories, k=self.config.eval.n_samples_per_prompt)
        timing = {"timing/evaluation": self.clock.take("evaluation")}
        self.recorder.evaluation(step, metrics | timing, trajectories)
        self.errors.check(trajectories, of="evaluation episodes")
        improved = self.best.improves(step, metrics)
        # Weights that are not trained yet are the model that the run was given.
        return improved and (step > 0 or bool(self.best.patience))
