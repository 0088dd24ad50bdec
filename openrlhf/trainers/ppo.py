"""The RL training loop.

PPO, REINFORCE++, RLOO and GRPO differ only in `credit` and in the policy loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from openrlhf import termination
from openrlhf.checkpoints.manager import CheckpointManager, note_of_end
from openrlhf.checkpoints.manifest import Checkpoint, RunState
from openrlhf.cluster.worker_group import HostHandles, WorkerGroup
from openrlhf.config.learning import RLFlags
from openrlhf.core.batches import Experience
from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.metrics import Last, Mean, Metric, values
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.budget import RewardErrors
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.engine import EngineError
from openrlhf.rollout.episode_metrics import rollout_metrics
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.checkpointing import Checkpointing
from openrlhf.trainers.clock import Clock
from openrlhf.trainers.evaluation import Evaluate, Evaluation
from openrlhf.trainers.experience_maker import ExperienceMaker, StepBatch
from openrlhf.trainers.filtering import pass_rate
from openrlhf.trainers.model_update import ModelUpdate
from openrlhf.trainers.outcome import Outcome
from openrlhf.trainers.pretraining_mix import PretrainingMix
from openrlhf.trainers.sources import Source
from openrlhf.trainers.utilisation import utilisation
from openrlhf.weights.publisher import WeightPublisher


class PPOTrainer:
    """The RL training loop.

    `play` generates the held-out episodes, or is None. `hosts` are the processes that run the
    models. `start` is the state before the first step.
    """

    def __init__(
        self,
        source: Source,
        maker: ExperienceMaker,
        weights: WeightPublisher,
        *,
        policy: WorkerGroup,
        critic: WorkerGroup | None,
        play: Evaluate | None,
        pretraining: PretrainingMix | None,
        manager: CheckpointManager,
        tokenizer: PreTrainedTokenizerBase,
        recorder: Recorder,
        hosts: Sequence[HostHandles],
        config: RLFlags,
        start: RunState,
    ) -> None:
        self.source = source
        self.maker = maker
        self.weights = weights
        self.recorder = recorder
        self.hosts = hosts
        self.config = config
        self.step = 0  # number of finished steps
        self.outcome = Outcome(dynamic_filter=source.dynamic_filter)
        self.clock = Clock(recorder.display.status)
        self.models = ModelUpdate(
            policy=policy, critic=critic, weights=weights, pretraining=pretraining, config=config
        )
        best = BestMetric(
            config.ckpt.best_metric_key, ending="_pass1", patience=config.eval.patience
        )
        self.evaluation = Evaluation(
            play=play,
            best=best,
            errors=source.errors,
            recorder=recorder,
            clock=self.clock,
            config=config,
        )
        self.checkpointing = Checkpointing(
            policy=policy,
            critic=critic,
            tokenizer=tokenizer,
            manager=manager,
            source=source,
            kl=maker.kl,
            best=best,
            recorder=recorder,
            clock=self.clock,
            config=config,
            start=start,
        )

    def fit(self) -> None:
        """Train until the prompts run out or a limit ends the run, then export the models."""
        self.begin()
        with self.saving_last_step():
            for trajectories in self.rollouts():  # τ ~ π_rollout
                with termination.deferred():
                    batch = self.annotate(trajectories)  # R, log π_old, log π_ref, V
                    if batch.is_filtered:
                        continue
                    experience, metrics = self.assign_credit(batch)  # r_t, Â_t, Ĝ_t
                    if experience.num_rows:
                        metrics |= self.improve(experience)  # V, π
                    self.adapt_kl(metrics)  # β
                    self.publish()  # π_rollout ← π_θ
                    self.end_step(metrics)
                if self.evaluation.is_due(self.step, last=self.is_last_step):
                    self.evaluate()
                if self.checkpointing.is_due(self.step, stopped=self.stopped):
                    self.save()
            self.finish()

    def begin(self) -> None:
        """Publish the initial or resumed weights, and evaluate them if an evaluation is due."""
        self.recorder.display.begin(self.source.total_steps, done=self.step)
        if self.samples_again:
            self.weights.publish(self.step)  # π_rollout ← π_θ
        if self.evaluation.is_due_at_start(self.step, last=self.is_last_step):
            self.evaluate()

    def rollouts(self) -> Iterator[list[Trajectory]]:
        """Yield each step's episodes until the prompts run out or a limit ends the run.

        The limits, --eval.patience and --algo.kl.stop_run, also apply to the state of a resumed
        run.
        """
        steps = iter(self.source)
        while not (self.stopped or self.evaluation.best.exhausted):
            with self.clock.part("generation"):
                trajectories = next(steps, None)
            if trajectories is None:
                return
            yield trajectories

    def annotate(self, trajectories: list[Trajectory]) -> StepBatch:
        """Compute the columns needed by the update, and log the samples.

        Raises RewardErrors if too many episodes have failed.
        """
        with self.clock.part("make_experience"):
            batch = self.maker.annotate(trajectories)
        self.outcome.see(batch)
        self.recorder.samples(self.step + 1, batch.trajectories)
        self.source.errors.check(batch.trajectories)
        return batch

    def assign_credit(self, batch: StepBatch) -> tuple[Experience, dict[str, Metric]]:
        """Compute advantages and returns.

        Return the rows to train on and the metrics collected so far. The rows are empty if no
        sample was kept, or if all samples are truncated and therefore dropped
        (--algo.loss.mask_truncated).
        """
        metrics = step_metrics(self.source, batch)
        experience = batch.experience
        if experience.num_rows:
            with self.clock.part("make_experience"):
                experience, credit = self.maker.credit(experience)
            metrics |= credit
        return experience, metrics

    def improve(self, experience: Experience) -> dict[str, Metric]:
        """Update the critic and the policy, and return the metrics of the update."""
        with self.clock.part("ppo_train"):
            kl_coef = self.maker.kl.coef
            metrics = self.models.improve(experience, step=self.step, kl_coef=kl_coef)
        self.outcome.updates += 1
        return metrics

    def adapt_kl(self, metrics: dict[str, Metric]) -> None:
        """Add the step's KL coefficient to `metrics`, and adapt it to the KL of the step."""
        if "train/kl" in metrics:
            metrics["train/kl_coef"] = Last(self.maker.kl.coef)
            samples = int(metrics["rollout/num_samples"].value)
            self.maker.kl.update(metrics["train/kl"].value, samples)

    def publish(self) -> None:
        """Publish the weights of the current step if the engines will sample from them.

        A step that has not updated the policy has nothing to publish. If the process was asked to
        terminate, do not wait for samples and publish nothing.
        """
        with self.clock.part("broadcast"):
            has_new_weights = self.weights.version == self.step + 1
            if not has_new_weights or not self.samples_again:
                return
            with self.source.publishing(self.step + 1) as is_quiet:
                if is_quiet:
                    self.weights.publish(self.step + 1)

    def end_step(self, metrics: dict[str, Metric]) -> None:
        """Count and log the step."""
        self.step += 1
        self.recorder.step(self.step, values(metrics | self.take_timing(metrics)))

    def take_timing(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Return the duration of each part of the step, and the utilization of the models."""
        parts = self.clock.take_all()
        timing: dict[str, Metric] = {}
        for name, seconds in parts.items():
            timing[f"timing/{name}"] = Last(seconds)
        total = sum(parts.values())
        timing["timing/step_total"] = Last(total)
        timing |= utilisation([hosts.take_spans() for hosts in self.hosts], total)
        tokens = metrics.get("train/total_length")
        if isinstance(tokens, Mean):
            timing["timing/tokens_per_second"] = Last(tokens.sum / total)
        return timing

    @property
    def stopped(self) -> bool:
        """True if --algo.kl.stop_run ends the run, because the KL of the last step is too large."""
        kl = self.maker.kl.last
        limit = self.config.algo.kl.stop_run
        return kl is not None and limit is not None and kl > limit

    @property
    def is_last_step(self) -> bool:
        """True if the current step is the last step."""
        return self.source.exhausted or self.stopped

    @property
    def samples_again(self) -> bool:
        """True if the engines sample again, for another step or an evaluation."""
        return self.evaluation.is_enabled or not self.is_last_step

    def evaluate(self) -> None:
        """Evaluate the published weights, and save a checkpoint if they are a new best.

        Termination interrupts only the sampling; everything else completes first.
        """
        trajectories = self.evaluation.sample(self.step)
        if trajectories is None:
            return
        with termination.deferred():
            if self.evaluation.judge(self.step, trajectories):
                self.checkpointing.save(self.step, best=True)

    def save(self) -> None:
        """Write a checkpoint. Termination is delayed until the checkpoint is complete."""
        with termination.deferred():
            self.checkpointing.save(self.step)

    def finish(self) -> None:
        """Evaluate and export the result. Raises NothingLearned if no batch was trained on."""
        # The filter may have used up the prompts before the last planned step and its evaluation.
        if self.evaluation.is_missing(self.step):
            self.evaluate()
        if self.stopped:
            self.note_stop()
        if self.source.exhausted and self.step < self.source.total_steps:
            rejected = self.outcome.rejections
            self.recorder.display.note(
                f"No prompts are left to train on after step {self.step}.{rejected}"
            )
        if not self.checkpointing.resumed:
            self.outcome.check()
        self.checkpointing.return_to_best(self.step)
        self.checkpointing.export()

    def note_stop(self) -> None:
        """Report why --algo.kl.stop_run ended the run."""
        kl = self.config.algo.kl
        note = (
            f"The run ends after step {self.step}: the KL to the reference is "
            f"{self.maker.kl.last:.4g} nats per token, above --algo.kl.stop_run {kl.stop_run:g}."
        )
        if not self.evaluation.best.patience:
            note += " The export contains the weights of this step."
        self.recorder.display.note(note)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.step = self.checkpointing.resume(checkpoint)

    @contextmanager
    def saving_last_step(self) -> Iterator[None]:
        """Save the last finished step if the block is terminated or fails.

        Handles termination, lost or failing engines and too many failed episodes. If checkpoints
        are disabled and an evaluation fails, the model is exported instead.
        """
        try:
            yield
        except (SystemExit, RolloutError, EngineError, RewardErrors) as error:
            if self.checkpointing.exported:  # nothing is lost
                raise
            ckpt = self.config.ckpt
            between_steps = self.step == self.source.step  # no batch is unfinished
            in_evaluation = between_steps and isinstance(error, RewardErrors)
            if in_evaluation and ckpt.save_steps <= 0 and self.outcome.updates:
                self.checkpointing.export()
                raise
            if ckpt.save_steps > 0 and between_steps and self.checkpointing.saved < self.step:
                self.checkpointing.save(self.step)
            if note := note_of_end(ckpt, saved=self.checkpointing.saved, step=self.step):
                self.recorder.display.note(note)
            raise


def step_metrics(source: Source, batch: StepBatch) -> dict[str, Metric]:
    """Return a step's metrics for rollout, generation cost and dynamic filtering."""
    metrics = rollout_metrics(batch.trajectories, batch.exclusions)
    metrics |= source.metrics() | batch.timing
    if source.dynamic_filter:
        metrics["train/dynamic_filtering_pass_rate"] = pass_rate(batch.trajectories)
    return metrics
