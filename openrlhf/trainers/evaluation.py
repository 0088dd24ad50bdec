"""Evaluations during an RL run: when an evaluation is due, and its results."""

from collections.abc import Callable
from dataclasses import dataclass

from openrlhf.config.learning import RLFlags
from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rollout.episode_metrics import evaluation_metrics
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.clock import Clock

Evaluate = Callable[[int], list[Trajectory]]  # generates with the weights after the given step


@dataclass(kw_only=True)
class Evaluation:
    """Evaluates the published weights on held-out prompts, and tracks the best value."""

    play: Evaluate | None  # generates held-out episodes; None without held-out prompts
    best: BestMetric
    errors: ErrorBudget
    recorder: Recorder
    clock: Clock
    config: RLFlags

    @property
    def is_enabled(self) -> bool:
        """True if the run evaluates its weights, including those of the last step."""
        return self.play is not None and self.config.eval.steps > 0

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return whether to evaluate the weights after `step`.

        The last step is always evaluated, and every evaluation takes place before the step's
        checkpoint is written.
        """
        every = self.config.eval.steps
        return every > 0 and (last or step % every == 0)

    def is_missing(self, step: int) -> bool:
        """Return whether the weights after `step` still need to be evaluated."""
        return self.config.eval.steps > 0 and self.best.evaluated_at < step

    def is_due_at_start(self, step: int, *, last: bool) -> bool:
        """Return whether the run starts with an evaluation.

        The result is True at step 0 with --eval.at_start. After a resume, the result is True if an
        evaluation is due at the resumed step but missing.
        """
        if step == 0:
            return self.config.eval.at_start and self.best.step is None
        return self.is_due(step, last=last) and self.is_missing(step)

    def sample(self, step: int) -> list[Trajectory] | None:
        """Return episodes of the held-out prompts, or None without held-out prompts."""
        if self.play is None:
            return None
        with self.clock.part("evaluation"):
            return self.play(step)

    def judge(self, step: int, trajectories: list[Trajectory]) -> bool:
        """Log pass@k and all other evaluation metrics.

        Return whether to save the weights as the new best.

        Raises RewardErrors if too many episodes have failed. An evaluation with too many failures
        is logged, but never counts as the best.
        """
        metrics = evaluation_metrics(trajectories, k=self.config.eval.n_samples_per_prompt)
        timing = {"timing/evaluation": self.clock.take("evaluation")}
        self.recorder.evaluation(step, metrics | timing, trajectories)
        self.errors.check(trajectories, of="evaluation episodes")
        improved = self.best.improves(step, metrics)
        # At step 0 the weights are still those of the initial model.
        return improved and (step > 0 or bool(self.best.patience))
