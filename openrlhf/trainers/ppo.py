"""The on-policy loop. PPO, REINFORCE++, RLOO and GRPO are choices inside `credit` and the policy
loss.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf import termination
from openrlhf.checkpoints.manager import SAVE_FAILED, CheckpointManager, note_of_end
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StagedCheckpoint
from openrlhf.cluster.worker_group import Call, HostHandles, WorkerGroup, gather
from openrlhf.config.learning import RLFlags
from openrlhf.core.batches import Experience, TokenRows
from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.metrics import Last, Mean, Metric, merge_all, values
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.budget import RewardErrors
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.episode_metrics import evaluation_metrics, rollout_metrics
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.experience_maker import Annotated, ExperienceMaker
from openrlhf.trainers.filtering import pass_rate
from openrlhf.trainers.outcome import Outcome
from openrlhf.trainers.pretraining_mix import PretrainingMix
from openrlhf.trainers.publisher import WeightPublisher
from openrlhf.trainers.sources import Source
from openrlhf.trainers.update_plan import RankUpdate, plan_update
from openrlhf.trainers.utilisation import utilisation
from openrlhf.workers.base import TrainedWorker, Update
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker

logger = logging.getLogger(__name__)
SOURCE = (
    "_source"  # the part of a checkpoint with the samples that wait, beside those of the models
)
Evaluate = Callable[[int], list[Trajectory]]  # of the weights after that step


@dataclass(eq=False, repr=False)
class PPOTrainer:
    """The training loop, and everything that happens after each step."""

    source: Source
    maker: ExperienceMaker
    policy: WorkerGroup
    critic: WorkerGroup | None
    weights: WeightPublisher
    _: KW_ONLY
    evaluate: Evaluate | None
    pretraining: PretrainingMix | None
    checkpoints: CheckpointManager
    tokenizer: PreTrainedTokenizerBase
    recorder: Recorder
    hosts: Sequence[HostHandles]  # the processes of all models
    config: RLFlags
    start: RunState  # of this run before its first step

    def __post_init__(self) -> None:
        self.ckpt = self.config.ckpt
        self.step = 0
        self.saved = -1  # the step of the newest checkpoint
        self.resumed = False
        self.stopped = False  # before the prompts are used up
        self.best = BestMetric(
            self.ckpt.best_metric_key, ending="_pass1", patience=self.config.eval.patience
        )
        self.timing: dict[str, Metric] = {}
        self.outcome = Outcome(keep=self.source.keep)

    def fit(self) -> None:
        """Train until the prompts or the patience are used up, then export."""
        self.recorder.display.begin(self.source.total_steps, done=self.step)
        self.weights.publish(self.step)  # π_rollout ← π_θ, also after a resume
        at_start = self.config.eval.at_start and self.step == 0 and self.best.step is None
        was_interrupted = (
            self.step > 0 and self.evaluation_is_due and self.best.evaluated_at < self.step
        )
        if at_start or was_interrupted:
            self.run_evaluation()
        with self.saved_when_it_ends():
            for trajectories in self.timed("generation", self.source):  # τ ~ π_rollout
                with termination.whole():
                    with self.clock("make_experience"):
                        batch = self.maker.annotate(trajectories)  # R, log π_old, log π_ref, V
                    self.record(batch)
                    if all(
                        t.filtered for t in trajectories
                    ):  # the rest of an epoch teaches nothing
                        continue
                    self.learn_from(batch)
                self.after_step()
                if self.stopped:
                    break
            # The last step is not evaluated with the others if filtering ended the run before its
            # planned end.
            if self.config.eval.steps > 0 and self.best.evaluated_at < self.step:
                self.run_evaluation()
            if self.source.exhausted and self.step < self.source.total_steps:
                why = self.outcome.rejections
                self.recorder.display.note(
                    f"No prompts to train on are left after step {self.step}.{why}"
                )
            if not self.resumed:
                self.outcome.check()
            self.return_to_best()
            self.export_final(Path(self.ckpt.output_dir).absolute())

    def learn_from(self, batch: Annotated) -> None:
        """The second half of a step: credit, update, publication."""
        metrics = [step_metrics(self.source, batch)]
        if batch.kept:
            with self.clock("make_experience"):
                experience, credit = self.maker.credit(batch.experience)  # r_t, Â_t, Ĝ_t
            metrics.append(credit)
            if (
                experience.num_samples
            ):  # not if all are truncated and --algo.loss.mask_truncated leaves them out
                metrics.append(self.update(experience))
        self.end_step(merge_all(metrics))

    def update(self, experience: Experience) -> dict[str, Metric]:
        """Update the models on a credited batch, and publish the policy."""
        with self.clock("ppo_train"):
            metrics = self.improve(experience)  # V, π
        with self.clock("broadcast"):
            self.publish()  # π_rollout ← π_θ
        self.outcome.updates += 1
        return metrics

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save the last finished step of a run that writes checkpoints, if the block is terminated
        or fails.

        A failure is the loss of all engines, or an evaluation in which too many episodes fail. A
        run that writes no checkpoints exports its model when such an evaluation ends it.
        """
        try:
            yield
        except (SystemExit, RolloutError, RewardErrors) as error:
            evaluated = self.step == self.source.step and isinstance(error, RewardErrors)
            if evaluated and self.ckpt.save_steps <= 0 and self.outcome.updates:
                self.export_final(Path(self.ckpt.output_dir).absolute())
                raise
            if (
                self.ckpt.save_steps > 0 and self.saved < self.step == self.source.step
            ):  # no batch was on its way here
                self.save()
            if note := note_of_end(self.ckpt, saved=self.saved, step=self.step):
                self.recorder.display.note(note)
            raise

    def record(self, batch: Annotated) -> None:
        """Log samples of the batch. Raises RewardErrors if too many of its episodes have failed."""
        self.outcome.see(batch)
        self.recorder.samples(self.step + 1, batch.trajectories)
        self.source.errors.check(batch.trajectories)

    def publish(self) -> None:
        """Publish the weights of the current step to the engines, unless the engines have them
        already.

        A process that is asked to end does not wait for samples, and publishes nothing.
        """
        if self.policy_is_frozen:
            return
        with self.source.publishing(self.step + 1) as is_quiet:
            if is_quiet:
                self.weights.publish(self.step + 1)

    @property
    def policy_is_frozen(self) -> bool:
        """Whether the current step trains the critic alone (--critic.freezing_steps)."""
        return self.step < self.config.frozen_steps

    def improve(self, experience: Experience) -> dict[str, Metric]:
        """Update critic and policy on a credited batch, in parallel if they have different devices.

        While the critic warms up (--critic.freezing_steps), the policy is not updated.
        """
        launched: list[Call] = []
        if self.critic:
            read = experience.only(*CriticWorker.reads)
            plans = self._plans(experience, self.critic.slices)
            jobs = [Update(experience=read.select(plan.rows), steps=plan.steps) for plan in plans]
            launched += self.critic.launch(CriticWorker.update, jobs)
        if not self.policy_is_frozen:
            plans = self._plans(experience, self.policy.slices)
            texts = self._pretraining_text(len(plans[0].steps))
            read = experience.only(*PolicyWorker.reads)
            jobs = [
                PolicyUpdate(
                    experience=read.select(plan.rows),
                    steps=plan.steps,
                    kl_coef=self.maker.kl.coef,
                    version=self.step + 1,
                    pretraining=text,
                )
                for plan, text in zip(plans, texts, strict=True)
            ]
            with self.weights.sending:  # no engine is being sent the weights
                launched += self.policy.launch(PolicyWorker.update, jobs)
        return merge_all(self._gather(launched, "update the models"))

    def _plans(self, experience: Experience, ranks: int) -> list[RankUpdate]:
        """Each rank's rows of every optimizer step. All roles take the same steps in the same
        order.
        """
        return plan_update(
            experience.lengths.tolist(),
            episodes=experience.episode_of_row.tolist(),
            ranks=ranks,
            batch_size=self.config.train.batch_size,
            epochs=self.config.train.max_epochs,
            seed=self.config.train.seed + self.step,
        )

    def _pretraining_text(self, steps: int) -> list[list[TokenRows]]:
        """Each rank's pretraining text for the next `steps` optimizer steps; empty without
        --algo.ptx.dataset.
        """
        if not self.pretraining:
            return [[] for _ in range(self.policy.slices)]
        first = self.step * self.config.updates_of(self.config.rollout.batch_size)
        return self.pretraining.for_ranks(range(first, first + steps), self.policy.slices)

    def _gather(self, launched: list[Call], doing: str) -> list[Any]:
        return gather(launched, timeout_s=self.config.train.step_timeout, doing=doing)

    def end_step(self, metrics: dict[str, Metric]) -> None:
        """Count and log the step, and adapt β."""
        self.step += 1
        if "train/kl" in metrics:
            metrics["train/kl_coef"] = Last(self.maker.kl.coef)
            self.maker.kl.update(
                metrics["train/kl"].value, int(metrics["rollout/num_samples"].value)
            )
        total = sum(part.value for part in self.timing.values())
        timing = self.timing | {"timing/step_total": Last(total)}
        timing |= utilisation([hosts.take_spans() for hosts in self.hosts], total)
        if isinstance(tokens := metrics.get("train/total_length"), Mean):
            timing["timing/tokens_per_second"] = Last(tokens.sum / total)
        self.timing = {}
        self.recorder.step(self.step, values(metrics | timing))
        self.stopped = self._is_too_far(metrics)

    def after_step(self) -> None:
        """Evaluate and save. Termination interrupts an evaluation, and waits for the end of a save."""
        if self.evaluation_is_due:
            self.run_evaluation()
        if self.ckpt.save_steps > 0 and (self.step % self.ckpt.save_steps == 0 or self.stopped):
            with termination.whole():
                self.save()

    def _is_too_far(self, metrics: Mapping[str, Metric]) -> bool:
        """Whether the KL to the reference exceeds --algo.kl.stop_run. If it does, the user is told."""
        kl, limit = metrics.get("train/kl", Last(0.0)).value, self.config.algo.kl.stop_run
        if limit is None or not kl > limit:
            return False
        self.recorder.display.note(
            f"The run ends after step {self.step}: the KL to the reference is {kl:.4g} nats per token, above "
            f"--algo.kl.stop_run {limit:g}."
            + (" The policy is exported as it is now." if not self.best.patience else "")
        )
        return True

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the weights of this step are evaluated, before their checkpoint is written."""
        every = self.config.eval.steps
        return every > 0 and (self.step % every == 0 or self.source.exhausted or self.stopped)

    def run_evaluation(self) -> None:
        """Measure pass@k of the published weights. A new best is saved.

        Raises RewardErrors if too many episodes have failed: such an evaluation is logged, and
        never the best.
        """
        if self.evaluate is None:
            return
        with self.clock("evaluation"):
            trajectories = self.evaluate(self.step)
        with termination.whole():
            metrics = evaluation_metrics(trajectories, k=self.config.eval.n_samples_per_prompt)
            timing = {"timing/evaluation": self.timing.pop("timing/evaluation").value}
            self.recorder.evaluation(self.step, metrics | timing, trajectories)
            self.source.errors.check(trajectories, of="evaluation episodes")
            if self.best.improves(self.step, metrics) and (self.step > 0 or self.best.patience):
                self.save(best=True)

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint of the current state."""
        if self.ckpt.disable_ds and not self.ckpt.save_hf:
            return
        with self.clock("checkpoint"), self.going_on_without():
            staged = self.checkpoints.begin(self.step, best=best, hf=self.ckpt.save_hf)
            with self.checkpoints.writing(staged):
                if not self.ckpt.disable_ds:
                    self._all_parts(TrainedWorker.save_checkpoint, staged, "save a checkpoint")
                    self.source.save(Path(staged.engine_dir(SOURCE)) / staged.tag)
                if self.ckpt.save_hf:
                    self.export(staged.hf_dir, final=False)
            self.checkpoints.commit(
                staged, state=self._state(), metric_value=self.best.value_of(self.step)
            )
            self.saved = self.step

    @contextmanager
    def going_on_without(self) -> Iterator[None]:
        """Within it, a checkpoint that cannot be written, as on a full disk, is told and does not
        end the run.
        """
        try:
            yield
        except CheckpointError as error:
            self.recorder.display.note(SAVE_FAILED.format(self.step, error))

    def _state(self) -> RunState:
        return replace(
            self.start,
            step=self.step,
            epoch=self.source.epoch,
            consumed=self.source.consumed,
            kl_coef=self.maker.kl.coef,
            **self.best.state(),
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        state, self.resumed = checkpoint.state, True
        self._all_parts(TrainedWorker.load_checkpoint, checkpoint, "load the checkpoint")
        self.step = state.step
        drawn = Path(checkpoint.engine_dir(SOURCE)) / checkpoint.tag
        self.source.resume(step=state.step, consumed=state.consumed, folder=drawn)
        if state.kl_coef is not None:
            self.maker.kl.resume(state.kl_coef)
        self.best.restore(state)

    def return_to_best(self) -> None:
        """With --eval.patience, load the weights of the best evaluation."""
        if checkpoint := self.best.to_export(
            self.step, self.checkpoints, self.recorder.display.note
        ):
            self.saved = self.step  # from now on, no checkpoint of this step can be written
            self._all_parts(TrainedWorker.load_checkpoint, checkpoint, "load the best weights")

    def _all_parts(self, method: Callable[..., None], files: StagedCheckpoint, doing: str) -> None:
        """Have all trained models write or read their files."""
        for part, group in self.parts().items():
            self._gather(group.broadcast(method, files.engine_dir(part), files.tag), doing)

    def parts(self) -> dict[str, WorkerGroup]:
        """The trained models by their name in a checkpoint."""
        return {"_actor": self.policy} | ({"_critic": self.critic} if self.critic else {})

    def export_final(self, folder: Path) -> None:
        """Write the policy to `folder`, and the critic beside it if the flags ask for the critic."""
        self.export(str(folder))
        self.recorder.display.note(f"model: {folder}")
        if self.critic and self.config.critic.save_value_network:
            exported = self.critic.broadcast(
                TrainedWorker.export, self.tokenizer, f"{folder}_critic"
            )
            self._gather(exported, "export the critic")

    def export(self, path: str, *, final: bool = True) -> None:
        """Write the policy in the format that Transformers and vLLM load. `final`: the run ends
        with this export.
        """
        self._gather(
            self.policy.broadcast(TrainedWorker.export, self.tokenizer, path, final),
            "export the policy",
        )

    def timed(self, name: str, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items, until the patience is used up. The seconds of waiting for each item count as
        `timing/<name>`.
        """
        iterator = iter(iterable)
        while not self.best.exhausted:
            with self.clock(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the seconds within it to `timing/<name>` of this step."""
        self.recorder.display.status(name.replace("_", " "))
        start = time.perf_counter()
        yield
        before = self.timing.get(f"timing/{name}", Last(0.0)).value
        self.timing[f"timing/{name}"] = Last(before + time.perf_counter() - start)


def step_metrics(source: Source, batch: Annotated) -> dict[str, Metric]:
    """Metrics of a step's rollout, of its cost, and of dynamic filtering."""
    metrics = rollout_metrics(batch.trajectories, batch.kept) | source.metrics() | batch.timing
    return metrics | (
        {"train/dynamic_filtering_pass_rate": pass_rate(batch.trajectories)} if source.keep else {}
    )
