"""The offline training loop: each accumulation window of rows gives one optimizer step.

A task defines the rows, the models, the counts and the loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf import termination
from openrlhf.checkpoints.manager import SAVE_FAILED, CheckpointManager, note_of_end
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StateLayout
from openrlhf.data.batching import ResumableSampler
from openrlhf.observability.metrics import Metric, merge_all, values
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.tasks import Micro, OfflineTask, Row, Rows
from openrlhf.training.engine import TrainEngine
from openrlhf.training.strategy import Strategy
from openrlhf.units import GIB
from openrlhf.workers.base import MicroBatchLimits, export_trained, update_metrics

BUCKET_BYTES = GIB  # maximum size in bytes of the weights that an export gathers at a time

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class SupervisedTrainer(Generic[Row, Micro]):
    """Trains a task: takes steps, logs, evaluates, writes checkpoints and exports the model.

    Every process has a trainer.
    """

    task: OfflineTask[Any, Row, Micro]
    engine: TrainEngine
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase
    train_rows: Rows
    eval_rows: Any  # evaluation rows, or None
    checkpoints: CheckpointManager
    recorder: Recorder | None  # None except in the main process
    start: RunState  # state of this run before its first step

    def __post_init__(self) -> None:
        config = self.task.config
        self.strategy = self.engine.strategy
        self.train = config.train
        self.ckpt = config.ckpt
        self.steps_per_epoch = len(self.train_rows) // self.train.batch_size
        self.total_steps = self.steps_per_epoch * self.train.max_epochs
        self.eval_steps = config.eval.steps
        if self.eval_steps < 1:
            self.eval_steps = self.steps_per_epoch
        self.limits = MicroBatchLimits(
            size=self.train.micro_batch_size, packed=config.ds.packing_samples
        )
        followed = self.ckpt.best_metric_key
        if not followed and not config.eval.patience:
            followed = "none"  # if no flag names a metric, only early stopping tracks a metric
        self.best = BestMetric(followed, ending="loss", patience=config.eval.patience)
        self.step = 0
        self.saved = -1  # step of the newest checkpoint
        self.measured_at = -1  # step of the evaluation whose results are stored in the model

    def fit(self) -> None:
        """Train until the steps run out or --eval.patience ends the run, then export the model."""
        if self.recorder:
            self.recorder.display.begin(self.total_steps, done=self.step)
        with termination.deferred():  # all ranks terminate together, after a step or the export
            if self.step > self.best.evaluated_at and self.step > 0 and self.evaluation_is_due:
                self.evaluate()  # resumed from a step that was not evaluated yet
            for window in self.windows():
                metrics = self.update(window)  # θ ← θ − η ∇ℓ(window)
                self.log_step(metrics)
                if self.evaluation_is_due:
                    self.evaluate()
                status = self._asked_to_end()
                if self.ckpt.saves and (self.step % self.ckpt.save_steps == 0 or status):
                    self.save()
                if status:
                    self.note(note_of_end(self.ckpt, saved=self.saved, step=self.step))
                    raise SystemExit(status)
            self.return_to_best()
            self.store_numbers()
            self.export(self.ckpt.output_dir)
        self.note(f"model: {self.ckpt.output_dir}")

    def note(self, text: str) -> None:
        """Print a line to the terminal, in the main process only."""
        if self.recorder:
            self.recorder.display.note(text)

    # ---- one optimizer step

    def windows(self) -> Iterator[list[Micro]]:
        """Yield this rank's micro-batches for each remaining optimizer step."""
        while self.step < self.total_steps and not self.best.exhausted:
            sampler = ResumableSampler(
                len(self.train_rows),
                seed=self.train.seed,
                dp_rank=self.strategy.dp_rank,
                dp_size=self.strategy.dp_size,
                batch_size=self.train.batch_size,
                consumed=self.step * self.train.batch_size,
            )
            of_rank = self.train.batch_size // self.strategy.dp_size
            for rows in self._loader(self.train_rows, sampler, of_rank):
                batch = self.task.collate(self.task.of_window(rows, self.strategy))
                yield self.task.micro_batches(batch, self.limits)
                if self.best.exhausted:
                    break

    def _loader(self, rows: Rows, order: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(
            cast(Dataset[Any], rows),
            batch_size=batch_size,
            sampler=order,
            collate_fn=list,
            num_workers=self.task.config.data.dataloader_num_workers,
            # By default, the loader would draw its seed from the generator used by dropout.
            generator=torch.Generator(),
        )

    def update(self, window: Sequence[Micro]) -> dict[str, Metric]:
        """Take an optimizer step. Return the metrics of this rank's rows by logged name."""
        result = self.engine.optimize(
            window,
            counts=self.task.counts,
            loss=self._loss,
            before=lambda micro: self.task.before(self.engine, micro.to(self.strategy.device)),
            max_nonfinite=self.train.max_nonfinite,
        )
        self.step += 1
        return update_metrics([result], self.engine, prefix="train/")

    def _loss(
        self, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        for frozen in self.task.frozen.values():
            frozen.rest()  # the first pass is over
        return self.task.loss(self.engine, micro.to(self.strategy.device), totals)

    def log_step(self, metrics: Mapping[str, Metric]) -> None:
        """Log the metrics of a step, merged over the ranks. Collective."""
        merged = merge_all(self.strategy.gather(metrics))
        if self.recorder:
            logged = {name: m for name, m in merged.items() if name.startswith("train/")}
            self.recorder.step(self.step, values(logged))

    def _asked_to_end(self) -> int:
        """Return the exit status of a termination request on any rank, or 0. Collective."""
        [status] = self.strategy.all_reduce([termination.asked()], "max")
        return int(status)

    # ---- evaluation

    @property
    def evaluation_is_due(self) -> bool:
        """True if the weights after this step must be evaluated."""
        at_interval = self.step % self.eval_steps == 0
        return self.eval_rows is not None and (at_interval or self.step == self.total_steps)

    def evaluate(self) -> None:
        """Evaluate and log the results, and save a new best.

        Stop if the process is asked to terminate.
        """
        numbers = self.measure(interruptible=True)
        if numbers is None:
            return
        if self.recorder:
            self.recorder.evaluation(self.step, numbers)
        if self.best.improves(self.step, numbers):
            self.save(best=True)

    def measure(self, *, interruptible: bool = False) -> dict[str, float] | None:
        """Return the task's metrics over all evaluation rows, each row counted once. Collective.

        As in training, a first pass over all rows runs before any loss is computed. Returns None on
        all ranks if `interruptible` and a rank is asked to terminate.
        """
        parts: list[dict[str, Metric]] = []
        with self.engine.evaluating(), torch.no_grad():
            micros: list[Micro] = []
            # The counts of the micro-batches with this rank's own rows.
            # These micro-batches come first.
            counts: list[dict[str, float]] = []
            for rows in self._evaluation_batches():
                if interruptible and self.task.has_first_pass and self._asked_to_end():
                    return None
                micro = self.task.collate(rows or [self.eval_rows[0]])
                numbers: Mapping[str, float] = {}
                if self.task.has_first_pass:
                    on_device = micro.to(self.strategy.device)
                    micro, numbers = self.task.before(self.engine, on_device)
                    micro = micro.to("cpu")  # a GPU has no room for all evaluation rows
                micros.append(micro)
                if rows:
                    counts.append({**self.task.counts(micro), **numbers})
            totals = self._totals(counts)
            for micro in micros:
                if interruptible and self._asked_to_end():
                    return None
                _, metrics = self._loss(micro, totals)  # a collective operation, run by every rank
                parts.append(metrics)
        counted = parts[: len(counts)]
        merged = merge_all(chain.from_iterable(self.strategy.gather(counted)))
        numbers = values(self.task.evaluation_names(merged))
        self.task.evaluated(self.engine.module, numbers)
        self.measured_at = self.step
        return numbers

    def _evaluation_batches(self) -> Iterator[list[Any]]:
        """Yield this rank's evaluation rows in micro-batches, which may be empty at the end.

        Every rank runs as many forward passes as rank 0, which has the most rows. Under ZeRO 3,
        forward passes and the check for an interruption are collective.
        """
        size = self.train.micro_batch_size
        ranks = self.strategy.dp_size
        order = range(self.strategy.dp_rank, len(self.eval_rows), ranks)
        loaded = chain.from_iterable(self._loader(self.eval_rows, order, size))
        own = self.task.of_window(list(loaded), self.strategy)
        rows_of_rank_0 = math.ceil(len(self.eval_rows) / ranks)
        for start in range(0, rows_of_rank_0, size):
            yield list(own[start : start + size])

    def _totals(self, counts: list[dict[str, float]]) -> dict[str, float]:
        """Return the micro-batches' counts and numbers, summed over all ranks. Collective."""
        every = list(chain.from_iterable(self.strategy.gather(counts)))
        totals: dict[str, float] = {}
        if every:
            for name in every[0]:
                totals[name] = math.fsum(part[name] for part in every)
        return totals

    def store_numbers(self, *, interruptible: bool = False) -> None:
        """Evaluate the weights to export, so that the model can store the results.

        All ranks must call this method. A reward model stores the mean and standard deviation of
        its rewards. If `interruptible` and a rank is asked to terminate, the model keeps the
        results of its latest evaluation.
        """
        stored = self.measured_at == self.step and not self.engine.average
        if self.eval_rows is None or not self.task.stores_numbers or stored:
            return
        with self.engine.averaged():
            self.measure(interruptible=interruptible)

    # ---- checkpoints

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint of the current state, or log why it failed and continue. Collective.

        With several ranks, raises CheckpointError if a rank cannot write its part, because the
        other ranks are waiting for it.
        """
        if not self.ckpt.has_files:
            return
        if not best and self._on_main(partial(self.checkpoints.save_linked, self.step)):
            self.saved = self.step
            return
        if self.ckpt.save_hf:
            self.store_numbers(interruptible=True)
        begin = partial(self.checkpoints.begin, self.step, best=best, hf=self.ckpt.save_hf)
        staged = self._on_main(begin)
        if staged is None:
            return
        try:
            with self.checkpoints.writing(staged):
                if not self.ckpt.disable_ds:
                    self.engine.save(staged.engine_dir(), staged.tag)
                if self.ckpt.save_hf:
                    self.export(staged.hf_dir, final=False)
        except CheckpointError as error:
            if self.strategy.layout.world_size > 1:
                raise
            self.note(SAVE_FAILED.format(self.step, error))
            return
        state = replace(
            self.start,
            step=self.step,
            epoch=self.step // self.steps_per_epoch,
            consumed=self.step * self.train.batch_size,
            **self.best.state(),
        )
        value = self.best.value_of(self.step)
        commit = partial(self.checkpoints.commit, staged, state=state, metric_value=value)
        if self._on_main(commit):
            self.saved = self.step

    def _on_main(self, work: Callable[[], T]) -> T | None:
        """Run `work` in the main process and return its result on all ranks. Collective.

        Returns None and prints a note if `work` raises CheckpointError.
        """
        outcome: T | CheckpointError | None = None
        if self.strategy.is_main:
            try:
                outcome = work()
            except CheckpointError as error:
                outcome = error
        outcome = self.strategy.broadcast(outcome)
        if isinstance(outcome, CheckpointError):
            self.note(SAVE_FAILED.format(self.step, outcome))
            return None
        return outcome

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Collective."""
        self.engine.load(checkpoint.engine_dir(), checkpoint.tag)
        self.step = checkpoint.state.step
        self.best.restore(checkpoint.state)

    # ---- export

    def return_to_best(self) -> None:
        """With --eval.patience, load the weights of the best evaluation. Collective."""
        checkpoint = self._on_main(
            partial(self.best.to_export, self.step, self.checkpoints, self.note)
        )
        if checkpoint:
            self.engine.load(checkpoint.engine_dir(), checkpoint.tag)
            self.measured_at = -1

    def export(self, path: str, *, final: bool = True) -> None:
        """Write the model in Transformers' format, or its adapters in PEFT's format. Collective.

        `final` marks the export that ends the run.
        """
        export_trained(
            self.engine,
            self.tokenizer,
            path,
            bucket_bytes=BUCKET_BYTES,
            masters=self.ckpt.export_fp32,
            final=final,
        )


def layout_of(strategy: Strategy, optim: str) -> StateLayout:
    """Return the layout of this run's checkpoint files, with the state of the optimizer `optim`."""
    config = strategy.config
    return StateLayout(
        world_size=strategy.layout.world_size,
        zero_stage=config.zero_stage,
        tensor_parallel_size=config.tensor_parallel_size,
        param_dtype=config.param_dtype,
        optim=optim,
    )
