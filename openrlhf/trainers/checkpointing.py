"""Checkpoints of an RL run: trained models, prompt position and best evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoints.manager import SAVE_FAILED, CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StagedCheckpoint
from openrlhf.cluster.worker_group import wait_for
from openrlhf.config.learning import RLFlags
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.clock import Clock
from openrlhf.trainers.exporting import Exporting
from openrlhf.trainers.sources import Source
from openrlhf.workers.base import TrainedWorker

# The parts of a checkpoint, each in a folder of its own.
POLICY_PART = "_actor"
CRITIC_PART = "_critic"
SOURCE_PART = "_source"  # the samples waiting for training


@dataclass(kw_only=True)
class Checkpointing:
    """Saves and resumes an RL run."""

    manager: CheckpointManager
    source: Source
    kl: KLController
    best: BestMetric
    exporting: Exporting
    recorder: Recorder
    clock: Clock
    config: RLFlags
    start: RunState  # state of this run before its first step
    saved: int = field(default=-1, init=False)  # step of the newest checkpoint
    resumed: bool = field(default=False, init=False)

    def is_due(self, step: int, *, stopped: bool) -> bool:
        """Return whether a checkpoint is due after `step`.

        If checkpoints are enabled, a checkpoint is due every --ckpt.save_steps steps and after an
        early stop.
        """
        every = self.config.ckpt.save_steps
        return every > 0 and (stopped or step % every == 0)

    def save(self, step: int, *, best: bool = False) -> None:
        """Write a checkpoint. If writing fails, report the failure and continue the run."""
        ckpt = self.config.ckpt
        if ckpt.disable_ds and not ckpt.save_hf:
            return
        with self.clock.part("checkpoint"):
            if not best and self.manager.save_linked(step):
                self.saved = step
                return
            try:
                self._write_and_commit(step, best=best)
            except CheckpointError as error:
                self.recorder.display.note(SAVE_FAILED.format(step, error))

    def _write_and_commit(self, step: int, *, best: bool) -> None:
        ckpt = self.config.ckpt
        staged = self.manager.begin(step, best=best, hf=ckpt.save_hf)
        with self.manager.writing(staged):
            if not ckpt.disable_ds:
                self._have_models(TrainedWorker.save_checkpoint, staged, "save a checkpoint")
                self.source.save(Path(staged.engine_dir(SOURCE_PART)) / staged.tag)
            if ckpt.save_hf:
                self.exporting.write_policy(staged.hf_dir, final=False)
        state = replace(
            self.start,
            step=step,
            epoch=self.source.epoch,
            consumed=self.source.consumed,
            kl_coef=self.kl.coef,
            kl=self.kl.last,
            **self.best.state(),
        )
        metric_value = self.best.value_of(step)
        self.manager.commit(staged, state=state, metric_value=metric_value)
        self.saved = step

    def resume(self, checkpoint: Checkpoint) -> int:
        """Continue from a checkpoint and return its step."""
        state = checkpoint.state
        self.resumed = True
        self._have_models(TrainedWorker.load_checkpoint, checkpoint, "load the checkpoint")
        drawn = Path(checkpoint.engine_dir(SOURCE_PART)) / checkpoint.tag
        self.source.resume(step=state.step, consumed=state.consumed, folder=drawn)
        if state.kl_coef is not None:
            self.kl.resume(state.kl_coef, state.kl)
        self.best.restore(state)
        return state.step

    def return_to_best(self, step: int) -> None:
        """With --eval.patience, load the weights of the best evaluation."""
        checkpoint = self.best.to_export(step, self.manager, self.recorder.display.note)
        if checkpoint:
            # From here on, no checkpoint may be written, because the models hold the best weights
            # instead of this step's weights. `saved` stops `saving_last_step` from writing a
            # checkpoint.
            self.saved = step
            self._have_models(TrainedWorker.load_checkpoint, checkpoint, "load the best weights")

    def _have_models(
        self, method: Callable[..., None], files: StagedCheckpoint, doing: str
    ) -> None:
        """Call `method` on all trained models, to write or read their files."""
        models = {POLICY_PART: self.exporting.policy}
        if self.exporting.critic:
            models[CRITIC_PART] = self.exporting.critic
        for part, model in models.items():
            calls = model.broadcast(method, files.engine_dir(part), files.tag)
            wait_for(calls, timeout_s=self.config.train.step_timeout, doing=doing)
