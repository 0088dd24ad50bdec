"""The base of all roles: micro-batches, forwards without gradient, and training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf.batches import Experience, Ragged
from openrlhf.checkpoints.export import check_disk_room, export_hf
from openrlhf.checkpoints.reloaded import TrainedState
from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.rollout import RolloutConfig
from openrlhf.config.shared import LoadingConfig, OptimizerConfig
from openrlhf.data.batching import batches_of_rows, batches_of_tokens
from openrlhf.distributed.engine import Metrics, StepResult, TrainEngine
from openrlhf.distributed.strategy import Strategy
from openrlhf.models.loading import LoadSpec
from openrlhf.models.probe import probe_logits
from openrlhf.models.proof import prove_layout
from openrlhf.observability.metrics import Last, Max, Mean, merge_all

Rows = TypeVar("Rows", bound=Ragged)
BUCKET_BYTES = {
    "cpu": 64 << 20,
    "cuda": 256 << 20,
}  # an engine leaves little memory of its GPU free


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """How many rows, or how many tokens, go through a model at once. If `max_tokens` is set, `size`
    is not used.

    A padded row costs as much as the longest row of its micro-batch. So with `size`, padded rows of
    similar lengths go together, the longest first. Packed rows keep their order, because a packed
    micro-batch of only long rows needs more memory than a mixed one.
    """

    size: int
    max_tokens: int | None = None
    packed: bool = False

    @classmethod
    def of_forwards(cls, rollout: RolloutConfig, ds: LoadingConfig) -> Self:
        """The limits of forwards without gradient."""
        return cls(
            size=rollout.micro_batch_size,
            max_tokens=rollout.max_tokens_per_gpu,
            packed=ds.packing_samples,
        )

    @classmethod
    def of_training(cls, train: RLTrainConfig, ds: LoadingConfig) -> Self:
        """The limits of forwards with gradient."""
        tokens = train.max_tokens_per_gpu if train.dynamic_batch_enable else None
        return cls(size=train.micro_batch_size, max_tokens=tokens, packed=ds.packing_samples)

    def cut(self, lengths: Tensor) -> list[list[int]]:
        """Row numbers of each micro-batch, for rows of `lengths` tokens. Every row is in one
        micro-batch.
        """
        if self.max_tokens:
            return batches_of_tokens(lengths.tolist(), self.max_tokens)
        order = (
            range(len(lengths))
            if self.packed
            else lengths.argsort(stable=True, descending=True).tolist()
        )
        return batches_of_rows(order, self.size)


@torch.no_grad()
def column_of(
    batch: Rows,
    forward: Callable[[Rows], Tensor],
    limits: MicroBatchLimits,
    strategy: Strategy,
    *,
    per_sample: bool = False,
) -> Tensor:
    """A column (N,) from a `forward` that gives each token of a micro-batch a number; (B,) if it
    gives each row one.

    Under ZeRO 3 a forward is collective: every rank runs as many micro-batches as the rank with the
    most.
    """
    parts = limits.cut(batch.lengths)
    sharded = strategy.config.zero_stage == 3
    rounds = int(strategy.all_reduce([len(parts)], "max")[0]) if sharded else len(parts)
    column = torch.zeros(batch.num_samples if per_sample else batch.num_tokens)
    for turn in range(rounds):
        rows = parts[min(turn, len(parts) - 1)]
        numbers = forward(batch.select(rows).to(strategy.device)).cpu()
        column[rows if per_sample else batch.places_of(rows)] = numbers
    return column


def balancing_term(
    aux_loss: Tensor | None, coef: float, count: float, name: str = "train/aux_loss"
) -> tuple[Tensor | float, Metrics]:
    """coef · aux · count, a micro-batch's term of the load-balancing loss, and its metric. 0 and
    none without the loss.

    `count`: the micro-batch's part of the window's denominator. The window then gets the mean of
    the losses of its micro-batches, weighted by their counts, and the coefficient means the same
    however the window is cut.
    """
    if aux_loss is None:
        return 0.0, {}
    return coef * count * aux_loss, {name: Mean(count * float(aux_loss.detach()), count)}


@dataclass(frozen=True, kw_only=True)
class RoleSettings:
    """The settings of a worker of RL: the flags, and the model to load."""

    config: RLFlags
    load: LoadSpec
    total_steps: int = (
        0  # optimizer steps of the run: the length of the learning-rate schedule of a trained model
    )


@dataclass(frozen=True, kw_only=True)
class Update:
    """One rank's rows of an update. For each optimizer step, `steps` lists the rows that the step
    trains on.
    """

    experience: Experience
    steps: list[list[int]]


Job = TypeVar("Job", bound=Update)


class TrainedWorker(ABC, Generic[Job]):
    """A model with an optimizer. Roles define counts and loss; `name` is the role's name in the
    logs.
    """

    name: ClassVar[str]

    def __init__(
        self,
        strategy: Strategy,
        settings: RoleSettings,
        optimizer: OptimizerConfig,
        load_model: Callable[[], nn.Module],
    ) -> None:
        self.strategy, self.config = strategy, settings.config
        self.bucket_bytes = BUCKET_BYTES[
            strategy.device.type
        ]  # of weights that are exported or published
        self.train_limits = MicroBatchLimits.of_training(self.config.train, self.config.ds)
        self.forward_limits = MicroBatchLimits.of_forwards(self.config.rollout, self.config.ds)
        self.engine = TrainEngine(
            strategy, load_model, optimizer, total_steps=settings.total_steps, name=self.name
        )
        prove_layout(self.engine.module)
        if strategy.is_main:
            check_disk_room(self.config.ckpt.output_dir, self.engine.exported_bytes)

    @abstractmethod
    def counts(self, micro: Any) -> Mapping[str, float]:
        """The denominators of a micro-batch."""

    @abstractmethod
    def loss(self, micro: Any, totals: Mapping[str, float], job: Job) -> tuple[Tensor, Metrics]:
        """This micro-batch's part of the window's loss, and its metrics under their logged names."""

    def update(self, job: Job) -> Metrics:
        """Take the optimizer steps of an update. Returns the metrics of this rank's tokens under
        their logged names.
        """
        results: list[StepResult] = []
        with self.engine.awake():
            for number in range(len(job.steps)):
                result = self.engine.optimize(
                    self.window(job, number),
                    counts=self.counts,
                    loss=lambda micro, totals: self.loss(
                        micro.to(self.strategy.device), totals, job
                    ),
                    max_nonfinite=self.config.train.max_nonfinite,
                )
                results.append(result)
                if self.has_moved_enough(result.metrics):
                    break
        step_metrics: Metrics = {
            f"train/{self.name}_steps": Last(float(len(results))),
            f"train/{self.name}_lr": Last(results[-1].lr),
            f"train/{self.name}_grad_norm": Last(results[-1].grad_norm),
            "train/nonfinite_steps": Max(float(self.engine.nonfinite_steps)),
        }
        shares = [result.changed for result in results if result.changed is not None]
        if shares:
            step_metrics[f"train/{self.name}_changed_weights"] = Last(sum(shares) / len(shares))
        return merge_all([*(result.metrics for result in results), step_metrics])

    def window(self, job: Job, number: int) -> list[Any]:
        """This rank's micro-batches of optimizer step `number` of the update.

        A rank without rows in the step runs the forwards of a row without actions, because some are
        collective.
        """
        rows = job.steps[number]
        batch = job.experience.select(rows or [0])
        if not rows:
            batch = replace(batch, action_mask=torch.zeros_like(batch.action_mask))
        return batch.split(self.train_limits.cut(batch.lengths))

    def has_moved_enough(self, metrics: Metrics) -> bool:
        """Whether to skip the remaining optimizer steps of the update; the same answer on every
        rank.
        """
        return False

    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint of this role, estimated; with the model that
        --ckpt.save_hf exports beside it.
        """
        exported = (
            self.engine.exported_bytes if self.config.ckpt.save_hf and self.name == "actor" else 0
        )
        return self.engine.checkpoint_bytes + exported

    def save_checkpoint(self, directory: str, tag: str) -> None:
        """Write weights, their average, optimizer, schedule and random state. Collective."""
        self.engine.save(directory, tag)

    def load_checkpoint(self, directory: str, tag: str) -> None:
        """Read what `save_checkpoint` wrote. Collective."""
        self.engine.load(directory, tag)

    def export(self, tokenizer: PreTrainedTokenizerBase, path: str, final: bool = True) -> None:
        """Write the model, or its adapters, or the average of what is trained if there is one.
        Collective.

        `final`: the run ends with this export.
        """
        with self.engine.awake(), self.engine.averaged():
            export_trained(
                self.engine,
                tokenizer,
                path,
                bucket_bytes=self.bucket_bytes,
                masters=self.config.ckpt.export_fp32,
                final=final,
            )


def export_trained(
    engine: TrainEngine,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    bucket_bytes: int,
    masters: bool,
    final: bool = True,
) -> None:
    """Write the model of an engine, which is awake and has the weights to export, and compare what
    was written with it.

    Collective. Raises ExportError, also if the files of a `final` export do not hold the trained
    model.
    """
    strategy = engine.strategy
    probed = final and not strategy.config.load_in_4bit
    trained = TrainedState(
        logits=probe_logits(engine.hf) if probed else None,
        precision=strategy.config.param_dtype,
        max_len=getattr(engine.module, "max_len", None),
        averages=engine.average.whole_weights if engine.average else {},
    )
    buckets = engine.exported_parameters(bucket_bytes, masters=masters)
    export_hf(
        buckets, engine.hf, tokenizer, path, writes=strategy.is_main, trained=trained, final=final
    )
    strategy.barrier()
