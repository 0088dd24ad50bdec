"""Files of an RL run: checkpoints of models, prompt position and best evaluation, and exports."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf import termination
from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoints.manager import SAVE_FAILED, CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StagedCheckpoint
from openrlhf.cluster.worker_group import Call, WorkerGroup, wait_for
from openrlhf.config.learning import RLFlags
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.clock import Clock
from openrlhf.trainers.sources import Source
from openrlhf.workers.base import TrainedWorker

# The parts of a checkpoint, each in a folder of its own.
POLICY_PART = "_actor"
CRITIC_PART = "_critic"
SOURCE_PART = "_source"  # the samples waiting for training


@dataclass(kw_only=True)
class Checkpointing:
    """Saves, resumes and exports an RL run."""

    policy: WorkerGroup
    critic: WorkerGroup | None
    tokenizer: PreTrainedTokenizerBase
    manager: CheckpointManager
    source: Source
    kl: KLController
    best: BestMetric
    recorder: Recorder
    clock: Clock
    config: RLFlags
    start: RunState  # state of this run before its first step
    saved: int = field(default=-1, init=False)  # step of the newest checkpoint
    resumed: bool = field(default=False, init=False)
    exported: bool = field(default=False, init=False)  # True once the final export is complete

    def is_due(self, step: int, *, stopped: bool) -> bool:
        """Return whether a checkpoint is due after `step`.

        If checkpoints are enabled, a checkpoint is due every --ckpt.save_steps steps and after an
        early stop.
        """
        every = self.config.ckpt.save_steps
        return every > 0 and (stopped or step % every == 0)

    def save(self, step: int, *, best: bool = False) -> None:
        """Write a checkpoint. If writing fails, report the failure and continue the run."""
        if not self.config.ckpt.has_files:
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
                self.export_policy(staged.hf_dir, final=False)
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
        self.saved = state.step
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
        models = {POLICY_PART: self.policy}
        if self.critic:
            models[CRITIC_PART] = self.critic
        for part, model in models.items():
            self._wait(model.broadcast(method, files.engine_dir(part), files.tag), doing)

    def export(self) -> None:
        """Write the trained models to --ckpt.output_dir at the end of the run.

        The critic is written only with --critic.save_value_network. If the run writes no
        checkpoints, termination is delayed until the export is complete, because an interrupted
        export would lose the models.
        """
        ckpt = self.config.ckpt
        if ckpt.saves and ckpt.has_files:
            self._export()
            return
        with termination.deferred():
            self._export()

    def _export(self) -> None:
        folder = Path(self.config.ckpt.output_dir).absolute()
        self.export_policy(str(folder), final=True)
        self.recorder.display.note(f"model: {folder}")
        if self.critic and self.config.critic.save_value_network:
            calls = self.critic.broadcast(TrainedWorker.export, self.tokenizer, f"{folder}_critic")
            self._wait(calls, "export the critic")
        self.exported = True

    def export_policy(self, path: str, *, final: bool) -> None:
        """Write the policy in Transformers' format. `final` marks the last export of the run."""
        calls = self.policy.broadcast(TrainedWorker.export, self.tokenizer, path, final)
        self._wait(calls, "export the policy")

    def _wait(self, calls: list[Call], doing: str) -> None:
        wait_for(calls, timeout_s=self.config.train.step_timeout, doing=doing)
