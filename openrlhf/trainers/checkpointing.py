"""The checkpoints of a run of RL: its trained models, its place in the prompts, and its best
evaluation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoints.manager import SAVE_FAILED, CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StagedCheckpoint
from openrlhf.cluster.worker_group import gather
from openrlhf.config.learning import RLFlags
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.clock import Clock
from openrlhf.trainers.exporting import Exporting
from openrlhf.trainers.sources import Source
from openrlhf.workers.base import TrainedWorker

SOURCE = "_source"  # the part with the samples that wait, beside those of the models


@dataclass(kw_only=True)
class Checkpointing:
    """Saves a run of RL and continues it."""

    manager: CheckpointManager
    source: Source
    kl: KLController
    best: BestMetric
    exporting: Exporting
    recorder: Recorder
    clock: Clock
    config: RLFlags
    start: RunState  # of this run before its first step
    saved: int = field(default=-1, init=False)  # the step of the newest checkpoint
    resumed: bool = field(default=False, init=False)

    def is_due(self, step: int, *, stopped: bool) -> bool:
        """Return whether a run that writes checkpoints writes one after `step`.

        It does every --ckpt.save_steps steps, and when it is stopped before its prompts end.
        """
        every = self.config.ckpt.save_steps
        return every > 0 and (stopped or step % every == 0)

    def save(self, step: int, *, best: bool = False) -> None:
        """Write a checkpoint. One that cannot be written is reported and does not end the run."""
        ckpt = self.config.ckpt
        if ckpt.disable_ds and not ckpt.save_hf:
            return
        with self.clock.part("checkpoint"), self._reporting_failure(step):
            staged = self.manager.begin(step, best=best, hf=ckpt.save_hf)
            with self.manager.writing(staged):
                if not ckpt.disable_ds:
                    self._have_models(TrainedWorker.save_checkpoint, staged, "save a checkpoint")
                    self.source.save(Path(staged.engine_dir(SOURCE)) / staged.tag)
                if ckpt.save_hf:
                    self.exporting.write_policy(staged.hf_dir, final=False)
            state = self._state(step)
            self.manager.commit(staged, state=state, metric_value=self.best.value_of(step))
            self.saved = step

    def resume(self, checkpoint: Checkpoint) -> int:
        """Continue from a checkpoint. Return its step."""
        state = checkpoint.state
        self.resumed = True
        self._have_models(TrainedWorker.load_checkpoint, checkpoint, "load the checkpoint")
        drawn = Path(checkpoint.engine_dir(SOURCE)) / checkpoint.tag
        self.source.resume(step=state.step, consumed=state.consumed, folder=drawn)
        if state.kl_coef is not None:
            self.kl.resume(state.kl_coef)
        self.best.restore(state)
        return state.step

    def return_to_best(self, step: int) -> None:
        """With --eval.patience, load the weights of the best evaluation."""
        checkpoint = self.best.to_export(step, self.manager, self.recorder.display.note)
        if checkpoint:
            self.saved = step  # from now on, no checkpoint of this step can be written
            self._have_models(TrainedWorker.load_checkpoint, checkpoint, "load the best weights")

    def _state(self, step: int) -> RunState:
        return replace(
            self.start,
            step=step,
            epoch=self.source.epoch,
            consumed=self.source.consumed,
            kl_coef=self.kl.coef,
            **self.best.state(),
        )

    def _have_models(
        self, method: Callable[..., None], files: StagedCheckpoint, doing: str
    ) -> None:
        """Have all trained models write or read their files."""
        models = {"_actor": self.exporting.policy}
        if self.exporting.critic:
            models["_critic"] = self.exporting.critic
        for name, group in models.items():
            launched = group.broadcast(method, files.engine_dir(name), files.tag)
            gather(launched, timeout_s=self.config.train.step_timeout, doing=doing)

    @contextmanager
    def _reporting_failure(self, step: int) -> Iterator[None]:
        """Report a checkpoint that cannot be written, as on a full disk, instead of raising."""
        try:
            yield
        except CheckpointError as error:
            self.recorder.display.note(SAVE_FAILED.format(step, error))
