"""The offline loop: windows of rows, one optimizer step each. A task defines rows, models, counts
and loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf import termination
from openrlhf.checkpoints.manager import SAVE_FAILED, CheckpointManager, note_of_end
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, EngineLayout, RunState
from openrlhf.data.batching import ResumableSampler
from openrlhf.observability.metrics import Last, Max, Metric, merge_all, values
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.tasks import Micro, OfflineTask, Row, Rows
from openrlhf.training.engine import TrainEngine
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import MicroBatchLimits, export_trained

T = TypeVar("T")


class EvaluationInterrupted(Exception):
    """A rank has been asked to end during an evaluation."""


@dataclass(eq=False, repr=False)
class SupervisedTrainer(Generic[Row, Micro]):
    """Runs a task: train, log, evaluate, checkpoint, export. One instance per process."""

    task: OfflineTask[Any, Row, Micro]
    engine: TrainEngine
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase
    train_rows: Rows
    eval_rows: Any  # rows without a summary, or None
    checkpoints: CheckpointManager
    recorder: Recorder | None
    start: RunState  # of this run before its first step

    def __post_init__(self) -> None:
        config, self.strategy = self.task.config, self.engine.strategy
        self.train, self.ckpt, patience = config.train, config.ckpt, config.eval.patience
        # Without a name, a metric is followed only if the patience waits for it.
        followed = self.ckpt.best_metric_key or ("" if patience else "none")
        self.best = BestMetric(followed, ending="loss", patience=patience)
        self.steps_per_epoch = len(self.train_rows) // self.train.batch_size
        self.total_steps = self.steps_per_epoch * self.train.max_epochs
        self.eval_steps = config.eval.steps if config.eval.steps > 0 else self.steps_per_epoch
        self.limits = MicroBatchLimits(
            size=self.train.micro_batch_size, packed=config.ds.packing_samples
        )
        self.step = 0
        self.saved = -1  # the step of the newest checkpoint
        self.measured_at = -1  # the step whose numbers the model stores

    def fit(self) -> None:
        """Train until the steps or the patience are used up, then export to --ckpt.output_dir."""
        if self.recorder:
            self.recorder.display.begin(self.total_steps, done=self.step)
        with termination.whole():  # the ranks end together, after a step or after the export
            if self.step > 0 and self.evaluation_is_due and self.best.evaluated_at < self.step:
                self.evaluate()  # it was interrupted
            for window in self.windows():
                self.learn_from(window)
            self.return_to_best()
            self.store_numbers()
            self.export(self.ckpt.output_dir)
        if self.recorder:
            self.recorder.display.note(f"model: {self.ckpt.output_dir}")

    def learn_from(self, window: list[Micro]) -> None:
        """One optimizer step, and what follows it."""
        result = self.engine.optimize(
            window,
            counts=self.task.counts,
            loss=self._loss,
            before=lambda micro: self.task.before(self.engine, micro.to(self.strategy.device)),
            max_nonfinite=self.train.max_nonfinite,
        )
        self.step += 1
        numbers: dict[str, Metric] = {
            "train/lr": Last(result.lr),
            "train/grad_norm": Last(result.grad_norm),
            "train/nonfinite_steps": Max(float(self.engine.nonfinite_steps)),
        }
        if result.changed is not None:
            numbers["train/changed_weights"] = Last(result.changed)
        self.after_step(result.metrics | numbers)

    def _loss(
        self, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        for frozen in self.task.frozen.values():
            frozen.rest()  # the first pass is over
        return self.task.loss(self.engine, micro.to(self.strategy.device), totals)

    def windows(self) -> Iterator[list[Micro]]:
        """This rank's micro-batches of each remaining optimizer step."""
        while self.step < self.total_steps and not self.best.exhausted:
            sampler = ResumableSampler(
                len(self.train_rows),
                seed=self.train.seed,
                dp_rank=self.strategy.dp_rank,
                dp_size=self.strategy.dp_size,
                batch_size=self.train.batch_size,
                consumed=self.step * self.train.batch_size,
            )
            for rows in self._loader(
                self.train_rows, sampler, self.train.batch_size // self.strategy.dp_size
            ):
                batch = self.task.collate(self.task.of_window(rows, self.strategy))
                yield self.task.micro_batches(batch, self.limits)
                if self.best.exhausted:
                    break

    def _loader(self, rows: Rows, sampler: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(
            cast(Dataset[Any], rows),
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=list,
            num_workers=self.task.config.data.dataloader_num_workers,
            generator=torch.Generator(),  # by default an iterator draws its seed from the generator of dropout
        )

    def after_step(self, metrics: Mapping[str, Metric]) -> None:
        """Log, evaluate, checkpoint."""
        every = self.strategy.gather(
            (dict(metrics), termination.asked())
        )  # one collective of a step for both
        merged = merge_all(numbers for numbers, _ in every)
        terminated = max(asked for _, asked in every)
        if self.recorder:
            logged = {name: m for name, m in merged.items() if name.startswith("train/")}
            self.recorder.step(self.step, values(logged))
        if self.evaluation_is_due:
            self.evaluate()
            terminated = self._asked_to_end()  # also during the evaluation
        if self.ckpt.save_steps > 0 and (self.step % self.ckpt.save_steps == 0 or terminated):
            self.save()
        if terminated:
            if self.recorder:
                self.recorder.display.note(note_of_end(self.ckpt, saved=self.saved, step=self.step))
            raise SystemExit(terminated)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the weights of this step are evaluated."""
        every_few_steps = self.step % self.eval_steps == 0
        return self.eval_rows is not None and (every_few_steps or self.step == self.total_steps)

    def _asked_to_end(self) -> int:
        """The status with which any rank has been asked to end, or 0. Collective over the ranks."""
        [status] = self.strategy.all_reduce([termination.asked()], "max")
        return int(status)

    def evaluate(self) -> None:
        """Measure and log, unless the process is asked to end meanwhile. A new best is saved."""
        try:
            numbers = self.measure(interruptible=True)
        except EvaluationInterrupted:
            return
        if self.recorder:
            self.recorder.evaluation(self.step, numbers)
        if self.best.improves(self.step, numbers):
            self.save(best=True)

    def measure(self, *, interruptible: bool = False) -> dict[str, float]:
        """The task's metrics over all evaluation rows, each row counted once. Collective over the
        ranks.

        As in training, a first pass over all rows comes before the losses. Raises
        EvaluationInterrupted on all ranks if it is `interruptible` and one of them is asked to end.
        """

        def look_for_end() -> None:
            if interruptible and self._asked_to_end():
                raise EvaluationInterrupted

        with self.engine.evaluating(), torch.no_grad():
            seen: list[tuple[tuple[Micro, Mapping[str, float]], bool]] = []
            for rows, counts in self._evaluation_batches():
                if self.task.has_first_pass:
                    look_for_end()
                batch = self.task.collate(rows).to(self.strategy.device)
                seen.append((self.task.before(self.engine, batch), counts))
            every = [
                {**self.task.counts(micro), **numbers}
                for (micro, numbers), counts in seen
                if counts
            ]
            every = [part for rank in self.strategy.gather(every) for part in rank]
            totals = {
                name: math.fsum(part[name] for part in every)
                for name in (every[0] if every else ())
            }
            parts: list[dict[str, Metric]] = []
            for (micro, _), counts in seen:
                look_for_end()
                _, metrics = self._loss(micro, totals)  # collective: every rank runs it
                if counts:
                    parts.append(metrics)
        merged = merge_all(part for rank in self.strategy.gather(parts) for part in rank)
        numbers = values(self.task.evaluation_names(merged))
        self.task.evaluated(self.engine.module, numbers)
        self.measured_at = self.step
        return numbers

    def store_numbers(self, *, interruptible: bool = False) -> None:
        """Let the model store statistics of the exported weights: a reward model stores the mean of
        its rewards.

        `interruptible`: if a rank is asked to end meanwhile, the model keeps those of its newest
        evaluation. Collective.
        """
        stored = self.measured_at == self.step and not self.engine.average
        if self.eval_rows is None or not self.task.stores_numbers or stored:
            return
        with suppress(EvaluationInterrupted), self.engine.averaged():
            self.measure(interruptible=interruptible)

    def _evaluation_batches(self) -> Iterator[tuple[list[Any], bool]]:
        """This rank's evaluation rows, and whether they count.

        Every rank runs as many forwards as rank 0, which has the most rows: under ZeRO 3 a forward
        is collective, and so is the check for an interruption.
        """
        assert self.eval_rows is not None
        size, ranks = self.train.micro_batch_size, self.strategy.dp_size
        sampler = ResumableSampler(
            len(self.eval_rows),
            seed=0,
            shuffle=False,
            dp_rank=self.strategy.dp_rank,
            dp_size=ranks,
            drop_last=False,
        )
        mine = [row for rows in self._loader(self.eval_rows, sampler, size) for row in rows]
        mine = self.task.of_window(mine, self.strategy)
        yield from [(list(mine[start : start + size]), True) for start in range(0, len(mine), size)]
        missing = math.ceil(math.ceil(len(self.eval_rows) / ranks) / size) - math.ceil(
            len(mine) / size
        )
        yield from [([self.eval_rows[0]], False)] * missing

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint of the current state, or report why it failed and continue. Collective
        over the ranks.

        Raises CheckpointError if one of several ranks cannot write its part: the other ranks wait
        for it.
        """
        if self.ckpt.disable_ds and not self.ckpt.save_hf:
            return
        if self.ckpt.save_hf:
            self.store_numbers(interruptible=True)
        staged = self._on_main(
            lambda: self.checkpoints.begin(self.step, best=best, hf=self.ckpt.save_hf)
        )
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
            self._note_failed_save(error)
            return
        state, value = self._state(), self.best.value_of(self.step)
        if self._on_main(lambda: self.checkpoints.commit(staged, state=state, metric_value=value)):
            self.saved = self.step

    def _on_main(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work` in the main process, on all ranks; None, with a note, if it
        is a CheckpointError.
        """
        outcome: T | CheckpointError | None = None
        if self.strategy.is_main:
            try:
                outcome = work()
            except CheckpointError as error:
                outcome = error
        outcome = self.strategy.broadcast(outcome)
        if isinstance(outcome, CheckpointError):
            self._note_failed_save(outcome)
            return None
        return outcome

    def _note_failed_save(self, error: CheckpointError) -> None:
        if self.recorder:
            self.recorder.display.note(SAVE_FAILED.format(self.step, error))

    def _state(self) -> RunState:
        return replace(
            self.start,
            step=self.step,
            epoch=self.step // self.steps_per_epoch,
            consumed=self.step * self.train.batch_size,
            **self.best.state(),
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Collective over the ranks."""
        self.engine.load(checkpoint.engine_dir(), checkpoint.tag)
        self.step = checkpoint.state.step
        self.best.restore(checkpoint.state)

    def return_to_best(self) -> None:
        """With --eval.patience, load the weights of the best evaluation. Collective over the ranks."""
        found = (
            self.best.to_export(self.step, self.checkpoints, self.recorder.display.note)
            if self.recorder
            else None
        )
        checkpoint: Checkpoint | None = self.strategy.broadcast(found)
        if checkpoint:
            self.engine.load(checkpoint.engine_dir(), checkpoint.tag)
            self.measured_at = -1

    def export(self, path: str, *, final: bool = True) -> None:
        """Write the model in Transformers' format, or its adapters in PEFT's; with
        --train.enable_ema the average. Collective.

        `final`: the run ends with this export.
        """
        with self.engine.averaged():
            export_trained(
                self.engine,
                self.tokenizer,
                path,
                bucket_bytes=1 << 30,
                masters=self.ckpt.export_fp32,
                final=final,
            )


def layout_of(strategy: Strategy) -> EngineLayout:
    """The layout of the files in which this run's engine stores its state."""
    config = strategy.config
    return EngineLayout(
        world_size=strategy.layout.world_size,
        zero_stage=config.zero_stage,
        param_dtype=config.param_dtype,
    )
