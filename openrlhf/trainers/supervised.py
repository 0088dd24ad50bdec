"""The offline loop: windows of rows, one optimizer step each. A `Task` supplies the model, the counts and the loss."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    EngineLayout,
    RunState,
    StagedCheckpoint,
)
from openrlhf.checkpoints.export import export_hf
from openrlhf.config.options import ConfigError
from openrlhf.config.shared import CheckpointConfig, TrainConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.errors import DataError
from openrlhf.data.loading import Table, load_datasets
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.distributed.strategy import NonFiniteError, Strategy, TrainEngine
from openrlhf.experience import Ragged
from openrlhf.models.loading import LoadSpec, ModelError
from openrlhf.observability.metrics import Last, Max, Metric, merge_all, values
from openrlhf.trainers.recorder import Recorder
from openrlhf.workers.base import MicroBatchLimits

# What a user can mend: printed without a traceback.
USER_ERRORS = (ConfigError, DataError, ModelError, CheckpointError, NonFiniteError)

ALL_ROWS = 10**8
T = TypeVar("T")
Row = TypeVar("Row", contravariant=True)
Micro = TypeVar("Micro", bound=Ragged)


class Task(Protocol[Row, Micro]):
    """One offline stage: how its rows become micro-batches, and what is minimised."""

    def collate(self, rows: Sequence[Row]) -> Micro:
        """Rows of the dataset as one ragged batch."""
        ...

    def micro_batches(self, batch: Micro, limits: MicroBatchLimits) -> list[Micro]:
        """The batch, cut; what belongs together stays together."""
        ...

    def counts(self, micro: Micro) -> Mapping[str, float]:
        """The denominators of a micro-batch."""
        ...

    def loss(self, model: Any, micro: Micro, totals: Mapping[str, float]) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's share of the window's loss, and its metrics under their logged names."""
        ...

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """What an evaluation logs, from the metrics of all its rows."""
        ...

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Let the model learn something from its evaluation. Called in every process with the same numbers."""
        ...


class Rows(Protocol):
    """A dataset of tokenised rows that can say in a sentence what it holds."""

    @property
    def summary(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of a run. Derived from the size of the data; `steps_per_epoch` ≥ 1."""

    rows: int
    batch_size: int
    max_epochs: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per pass over the data; an incomplete last batch is left out."""
        return self.rows // self.batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps_per_epoch * self.max_epochs


class SupervisedTrainer(Generic[Row, Micro]):
    """Runs a task: train, log, evaluate, checkpoint, export. One instance per process."""

    def __init__(
        self,
        task: Task[Row, Micro],
        engine: TrainEngine,
        strategy: Strategy,
        *,
        tokenizer: PreTrainedTokenizerBase,
        train_rows: Rows,
        eval_rows: Rows | None,
        schedule: Schedule,
        train: TrainConfig,
        ckpt: CheckpointConfig,
        checkpoints: CheckpointManager,
        eval_steps: int,
        num_workers: int,
        recorder: Recorder | None,
        run_dir: str,
    ) -> None:
        self.task, self.engine, self.strategy, self.tokenizer = task, engine, strategy, tokenizer
        self.train_rows, self.eval_rows = train_rows, eval_rows
        self.schedule, self.train, self.ckpt = schedule, train, ckpt
        self.eval_steps = eval_steps if eval_steps > 0 else schedule.steps_per_epoch
        self.num_workers, self.recorder, self.run_dir = num_workers, recorder, run_dir
        self.limits = MicroBatchLimits(size=train.micro_batch_size)
        self.checkpoints = checkpoints
        self.step = self.resumed_at = 0

    def fit(self) -> None:
        """Train to the end, then export to --ckpt.output_dir."""
        if self.recorder:
            self.recorder.display.begin(self.schedule.total_steps, done=self.step)
        for window in self.windows():
            result = self.engine.optimize(
                window,
                counts=self.task.counts,
                loss=lambda micro, totals: self.task.loss(self.engine, micro.to(self.strategy.device), totals),
                max_nonfinite=self.train.max_nonfinite,
            )
            self.step += 1
            numbers: dict[str, Metric] = {
                "train/lr": Last(result.lr),
                "train/grad_norm": Last(result.grad_norm),
                "train/nonfinite_steps": Max(float(self.engine.nonfinite_steps)),
            }
            self.after_step(result.metrics | numbers)
        if self.eval_rows is not None and self.schedule.total_steps == self.resumed_at:
            self.measure()  # what `evaluated` keeps with the model is in no checkpoint
        self.export(self.ckpt.output_dir)

    def windows(self) -> Iterator[list[Micro]]:
        """This rank's micro-batches of each optimizer step, from where the run stands."""
        while self.step < self.schedule.total_steps:
            sampler = ResumableSampler(
                self.schedule.rows,
                seed=self.train.seed,
                dp_rank=self.strategy.dp_rank,
                dp_size=self.strategy.dp_size,
                batch_size=self.schedule.batch_size,
                consumed=self.step * self.schedule.batch_size,
            )
            for rows in self._loader(self.train_rows, sampler, self.schedule.batch_size // self.strategy.dp_size):
                batch = self.task.collate(rows)
                yield self.task.micro_batches(batch, self.limits)

    def _loader(self, rows: Rows, sampler: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(
            cast(Dataset[Any], rows),
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=list,
            num_workers=self.num_workers,
            persistent_workers=False,
        )

    def after_step(self, metrics: Mapping[str, Metric]) -> None:
        """Log, evaluate, checkpoint."""
        merged = merge_all(self.strategy.gather(dict(metrics)))
        if self.recorder:
            logged = {name: m for name, m in merged.items() if name.startswith("train/")}
            self.recorder.step(self.step, values(logged))
        last = self.step == self.schedule.total_steps
        if self.eval_rows is not None and (self.step % self.eval_steps == 0 or last):
            self.evaluate()
        if self.ckpt.save_steps > 0 and self.step % self.ckpt.save_steps == 0:
            self.save()

    def evaluate(self) -> None:
        """Measure and log."""
        numbers = self.measure()
        if self.recorder:
            self.recorder.evaluation(self.step, numbers)

    def measure(self) -> dict[str, float]:
        """The task's metrics over all evaluation rows, each counted once. Collective over the ranks."""
        model = self.engine.module.eval()
        parts: list[dict[str, Metric]] = []
        with torch.no_grad():
            for rows, counts in self._evaluation_batches():
                micro = self.task.collate(rows).to(self.strategy.device)
                _, metrics = self.task.loss(self.engine, micro, self.task.counts(micro))
                parts += [metrics] if counts else []
        model.train()
        merged = merge_all(part for rank in self.strategy.gather(parts) for part in rank)
        numbers = values(self.task.evaluation_names(merged))
        self.task.evaluated(model, numbers)
        return numbers

    def _evaluation_batches(self) -> Iterator[tuple[list[Any], bool]]:
        """This rank's evaluation rows, and whether they count.

        Under ZeRO 3 a forward is collective: every rank runs as many as rank 0, which has most rows.
        """
        assert self.eval_rows is not None
        size, ranks = self.train.micro_batch_size, self.strategy.dp_size
        sampler = ResumableSampler(
            len(self.eval_rows), seed=0, shuffle=False, dp_rank=self.strategy.dp_rank, dp_size=ranks, drop_last=False
        )
        rows = [self.eval_rows[0]]
        for rows in self._loader(self.eval_rows, sampler, size):
            yield rows, True
        if self.strategy.config.zero_stage == 3:
            most = math.ceil(len(self.eval_rows) / ranks)
            yield from [(rows, False)] * (math.ceil(most / size) - math.ceil(len(sampler) / size))

    def save(self) -> None:
        """Write a checkpoint of the run as it stands. Collective over the ranks."""
        if self.ckpt.disable_ds and not self.ckpt.save_hf:
            return
        begun = self.checkpoints.begin(self.step, hf=self.ckpt.save_hf) if self.strategy.is_main else None
        staged: StagedCheckpoint = self.strategy.broadcast(begun)
        if not self.ckpt.disable_ds:
            self.engine.save(staged.engine_dir(), staged.tag)
        if self.ckpt.save_hf:
            self.export(staged.hf_dir)
        if self.strategy.is_main:
            self.checkpoints.commit(staged, state=self._state())
        self.strategy.barrier()

    def _state(self) -> RunState:
        layout = EngineLayout(world_size=self.strategy.dp_size, zero_stage=self.strategy.config.zero_stage)
        return RunState(
            step=self.step,
            epoch=self.step // self.schedule.steps_per_epoch,
            consumed=self.step * self.schedule.batch_size,
            run_dir=self.run_dir,
            engines={"": layout},
            extra={"batch_size": self.schedule.batch_size, "rows": self.schedule.rows, "seed": self.train.seed},
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint stands. Collective over the ranks."""
        self.engine.load(checkpoint.engine_dir(), checkpoint.tag)
        self.step = self.resumed_at = checkpoint.state.step

    def export(self, path: str) -> None:
        """Write the model as Transformers loads it. Collective over the ranks."""
        hf: nn.Module = self.engine.module.get_submodule("hf")
        assert isinstance(hf, PreTrainedModel)
        export_hf(self.engine.full_parameters(1 << 30), hf, self.tokenizer, path, writes=self.strategy.is_main)
        self.strategy.barrier()


def run_supervised(
    config: SupervisedConfig,
    task: Task[Row, Micro],
    load_model: Callable[[], nn.Module],
    *,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Rows,
    eval_rows: Rows | None,
) -> None:
    """Train a task as the flags say: schedule, engine, resume, loop. Runs in every process of the launcher.

    Raises DataError for too few rows, and CheckpointError where --ckpt.load_enable finds a checkpoint of another run.
    """
    schedule = make_schedule(config, train_rows)
    plan = f"{train_rows.summary} {schedule.total_steps} optimizer step(s) of {schedule.batch_size} rows"
    if config.dry_run:
        print(plan)
        print(f"first row: {tokenizer.decode(task.collate([train_rows[0]]).tokens.tolist())!r}")
        return
    strategy = Strategy(config.ds, seed=config.train.seed, full_determinism=config.train.full_determinism_enable)
    checkpoints = open_checkpoints(config.ckpt)
    # One process looks: finding the newest checkpoint also tidies up after a save that was killed.
    found = checkpoints.latest() if config.ckpt.load_enable and strategy.is_main else None
    checkpoint: Checkpoint | None = strategy.broadcast(found)
    if checkpoint:
        check_resumable(checkpoint, schedule, strategy, seed=config.train.seed)
    engine = strategy.trained(load_model, config, total_steps=schedule.total_steps)
    recorder = None
    if strategy.is_main:
        recorder = Recorder(config, resumed=checkpoint.state if checkpoint else None)
        recorder.display.note(f"{plan} on {strategy.dp_size} process(es).")
    trainer = SupervisedTrainer(
        task,
        engine,
        strategy,
        tokenizer=tokenizer,
        train_rows=train_rows,
        eval_rows=eval_rows,
        schedule=schedule,
        train=config.train,
        ckpt=config.ckpt,
        checkpoints=checkpoints,
        eval_steps=config.eval.steps,
        num_workers=config.data.dataloader_num_workers,
        recorder=recorder,
        run_dir=checkpoint.state.run_dir if checkpoint else os.path.abspath(config.run.dir),
    )
    try:
        if checkpoint:
            trainer.resume(checkpoint)
        trainer.fit()
    finally:
        if recorder:
            recorder.close()
    torch.distributed.destroy_process_group()


def load_tokenizer(config: SupervisedConfig, *, padding_side: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model to train."""
    return get_tokenizer(
        config.model.model_name_or_path,
        padding_side=padding_side,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
        chat_template=config.data.tokenizer_chat_template,
    )


def load_rows(config: SupervisedConfig, encoded: Callable[[Table], T]) -> tuple[T, T | None]:
    """The training and the evaluation rows, as `encoded` makes them; --data.max_samples is about training only."""
    data, evaluation, seed = config.data, config.eval, config.train.seed
    most, split, probs = data.max_samples, data.dataset_split, data.dataset_probs
    train = encoded(load_datasets(data.dataset, split=split, probs=probs, max_samples=most, seed=seed))
    if not evaluation.dataset:
        return train, None
    return train, encoded(load_datasets(evaluation.dataset, split=evaluation.split, max_samples=ALL_ROWS, seed=seed))


def load_spec(config: SupervisedConfig) -> LoadSpec:
    """How the flags ask for the model."""
    return LoadSpec(
        path=config.model.model_name_or_path,
        param_dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        packing=config.ds.packing_samples,
        gradient_checkpointing=config.model.gradient_checkpointing_enable,
        reentrant=config.model.gradient_checkpointing_reentrant,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_schedule(config: SupervisedConfig, rows: Rows) -> Schedule:
    """The steps of a run. Raises DataError where the rows do not fill one optimizer step."""
    train = config.train
    schedule = Schedule(rows=len(rows), batch_size=train.batch_size, max_epochs=train.max_epochs)
    if schedule.steps_per_epoch == 0:
        raise DataError(
            f"--data.dataset {config.data.dataset} has {len(rows)} usable rows, fewer than one "
            f"--train.batch_size of {train.batch_size}: lower it. {rows.summary}"
        )
    return schedule


def open_checkpoints(ckpt: CheckpointConfig) -> CheckpointManager:
    """The checkpoints at --ckpt.path; with --ckpt.disable_ds they are exports only."""
    parts = [] if ckpt.disable_ds else [""]
    return CheckpointManager(ckpt.path, parts=parts, max_num=ckpt.max_num, max_mem_gib=ckpt.max_mem)


def check_resumable(checkpoint: Checkpoint, schedule: Schedule, strategy: Strategy, *, seed: int) -> None:
    """Raise CheckpointError, naming every reason, where the run is not one that the checkpoint can continue."""
    checkpoint.check_continued_by(
        {"": EngineLayout(world_size=strategy.dp_size, zero_stage=strategy.config.zero_stage)},
        layout="as many processes and the same --ds.zero_stage",
        data={
            "batch_size": (schedule.batch_size, "--train.batch_size"),
            "rows": (schedule.rows, "--data.dataset and --data.max_samples"),
            "seed": (seed, "--train.seed"),
        },
    )
