"""Base classes for worker roles: micro-batches, forward passes without gradient, and training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from openrlhf.checkpoints.export import check_disk_room, export_hf
from openrlhf.checkpoints.reloaded import TrainedState
from openrlhf.checks import report
from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.config.rollout import RolloutConfig
from openrlhf.config.shared import DeepSpeedConfig, LoadingConfig
from openrlhf.core.batches import Experience, Ragged
from openrlhf.data.batching import batches_of_padded_tokens, batches_of_rows, batches_of_tokens
from openrlhf.models.cost import attention_length
from openrlhf.models.loading import LoadSpec
from openrlhf.models.probe import probe_logits
from openrlhf.models.proof import prove_layout
from openrlhf.models.ring_attention import CHUNKS_PER_RANK
from openrlhf.observability.metrics import Last, Max, Mean, merge_all
from openrlhf.training.engine import Metrics, StepResult, TrainEngine
from openrlhf.training.gathered import exported_bytes, exported_parameters
from openrlhf.training.strategy import Strategy
from openrlhf.units import MIB

Rows = TypeVar("Rows", bound=Ragged)
# Weight bucket size by device type. An inference engine leaves little GPU memory free.
BUCKET_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """The limits on the rows or tokens in one micro-batch.

    If `max_tokens` is set, `size` is ignored. A padded row costs as much as the longest row of its
    micro-batch, so padded rows are grouped by length, and the longest rows come first. If the limit
    is a number of rows, packed rows keep their order, because a packed micro-batch of only long
    rows would need more memory than a mixed micro-batch. If the limit is a number of tokens, packed
    micro-batches have similar costs.
    """

    size: int
    max_tokens: int | None = None
    packed: bool = False
    attention_length: int | None = None  # see `models.cost`; None if cost is the number of tokens

    @classmethod
    def of_forwards(cls, rollout: RolloutConfig, ds: LoadingConfig) -> Self:
        """Return the limits for forward passes without gradient."""
        return cls(
            size=rollout.micro_batch_size,
            max_tokens=_tokens_per_slice(rollout.max_tokens_per_gpu, ds),
            packed=ds.packing_samples,
        )

    def for_model(self, config: PretrainedConfig) -> Self:
        """Return the same limits, but balanced by this model's attention cost."""
        return replace(self, attention_length=attention_length(config))

    @classmethod
    def of_training(cls, train: RLTrainConfig, ds: LoadingConfig) -> Self:
        """Return the limits for forward passes with gradient."""
        max_tokens = None
        if train.dynamic_batch_enable:
            max_tokens = _tokens_per_slice(train.max_tokens_per_gpu, ds)
        return cls(size=train.micro_batch_size, max_tokens=max_tokens, packed=ds.packing_samples)

    def cut(self, lengths: Tensor, *, at_least: int = 1) -> list[list[int]]:
        """Return the row indices of each micro-batch, for rows of `lengths` tokens.

        Every row is in exactly one micro-batch. There are at least `at_least` micro-batches if
        there are enough rows.
        """
        if self.max_tokens and self.packed:
            return batches_of_tokens(
                lengths.tolist(),
                self.max_tokens,
                attention_length=self.attention_length,
                at_least=at_least,
            )
        if self.max_tokens:
            return batches_of_padded_tokens(lengths.tolist(), self.max_tokens, at_least=at_least)
        if self.packed:
            return batches_of_rows(range(len(lengths)), self.size, at_least=at_least)
        longest_first = lengths.argsort(stable=True, descending=True).tolist()
        return batches_of_rows(longest_first, self.size, at_least=at_least)


def _tokens_per_slice(tokens_per_gpu: int | None, ds: LoadingConfig) -> int | None:
    """Return the token budget of a group of ranks that each compute a part of the same rows.

    A ring gives every rank two chunks of equal length, so an odd budget is rounded down.
    """
    if tokens_per_gpu is None:
        return None
    if isinstance(ds, DeepSpeedConfig) and ds.ring_attn_size > 1:
        even = tokens_per_gpu - tokens_per_gpu % CHUNKS_PER_RANK
        tokens_per_gpu = max(CHUNKS_PER_RANK, even)
    return tokens_per_gpu * ds.ranks_per_slice


@torch.no_grad()
def column_of(
    batch: Rows,
    forward: Callable[[Rows], Tensor],
    limits: MicroBatchLimits,
    strategy: Strategy,
) -> Tensor:
    """Run `forward` on all micro-batches, and return its values for all tokens as a column (N,).

    Under ZeRO 3, forward passes are collective. A rank that cannot fill as many micro-batches as
    the other ranks repeats its last micro-batch.
    """
    micro_batches = limits.cut(batch.lengths)
    rounds = len(micro_batches)
    if strategy.config.zero_stage == 3:
        rounds = int(strategy.all_reduce([rounds], "max")[0])
        micro_batches = limits.cut(batch.lengths, at_least=rounds)
    column = torch.zeros(batch.num_tokens)
    for number in range(rounds):
        rows = micro_batches[min(number, len(micro_batches) - 1)]
        scored = forward(batch.select(rows).to(strategy.device)).cpu()
        column[batch.places_of(rows)] = scored
    return column


def mean_of(values: Tensor, count: float) -> Mean:
    """Return the metric Σ values ÷ count."""
    return Mean(float(values.detach().sum()), count)


def update_metrics(results: Sequence[StepResult], engine: TrainEngine, *, prefix: str) -> Metrics:
    """Return the merged metrics of optimizer steps. `prefix` begins the names of their settings."""
    metrics = merge_all(result.metrics for result in results)
    metrics[f"{prefix}lr"] = Last(results[-1].lr)
    metrics[f"{prefix}grad_norm"] = Last(results[-1].grad_norm)
    metrics["train/nonfinite_steps"] = Max(engine.nonfinite_steps)
    changed = [result.changed for result in results if result.changed is not None]
    if changed:
        metrics[f"{prefix}changed_weights"] = Last(sum(changed) / len(changed))
    return metrics


def balancing_term(
    aux_loss: Tensor | None, coef: float, count: float, name: str = "train/aux_loss"
) -> tuple[Tensor | float, Metrics]:
    """Return coef · aux · count, a micro-batch's term of the load-balancing loss, and its metric.

    Returns 0 and no metric if `aux_loss` is None. `count` is the micro-batch's part of the window's
    denominator. The window's loss is therefore the mean over its micro-batches, weighted by their
    counts, and the effect of the coefficient does not depend on how the window is split.
    """
    if aux_loss is None:
        return 0.0, {}
    return coef * count * aux_loss, {name: Mean(count * float(aux_loss.detach()), count)}


@dataclass(frozen=True, kw_only=True)
class RoleSettings:
    """The settings of an RL worker: the flags, and the model to load."""

    config: RLFlags
    load: LoadSpec
    # Number of optimizer steps in the run: the length of a trained model's learning-rate schedule.
    total_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Update:
    """The rows of one data slice for an update.

    `steps[k]` are the positions in this slice's rows that optimizer step k trains on.
    """

    experience: Experience
    steps: list[list[int]]


Job = TypeVar("Job", bound=Update)


class TrainedWorker(ABC, Generic[Job]):
    """A model with an optimizer. Each subclass is a role with its own counts and loss.

    `name` is the role's name in the logs.
    """

    name: ClassVar[str]

    def __init__(
        self,
        strategy: Strategy,
        settings: RoleSettings,
        optimizer: OptimizerConfig,
        load_model: Callable[[], nn.Module],
    ) -> None:
        self.strategy = strategy
        self.config = settings.config
        # The size of a weight bucket in exports and publications.
        self.bucket_bytes = BUCKET_BYTES[strategy.device.type]
        self.engine = TrainEngine(
            strategy, load_model, optimizer, total_steps=settings.total_steps, name=self.name
        )
        model = self.engine.hf.config
        train_limits = MicroBatchLimits.of_training(self.config.train, self.config.ds)
        self.train_limits = train_limits.for_model(model)
        forward_limits = MicroBatchLimits.of_forwards(self.config.rollout, self.config.ds)
        self.forward_limits = forward_limits.for_model(model)
        found = prove_layout(self.engine.module)
        if strategy.is_main:
            found += check_disk_room(self.config.ckpt.output_dir, exported_bytes(self.engine))
        report(*found)

    @abstractmethod
    def counts(self, micro: Any) -> Mapping[str, float]:
        """Return a micro-batch's parts of the loss denominators."""

    @abstractmethod
    def loss(self, micro: Any, totals: Mapping[str, float], job: Job) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's part of the window's loss, and its metrics by logged name."""

    def update(self, job: Job) -> Metrics:
        """Take the optimizer steps of an update.

        Returns the metrics of this rank's tokens by their logged names.
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
        metrics = update_metrics(results, self.engine, prefix=f"train/{self.name}_")
        metrics[f"train/{self.name}_steps"] = Last(len(results))
        return metrics

    def window(self, job: Job, number: int) -> list[Any]:
        """Return this rank's micro-batches for optimizer step `number` of the update.

        A rank that has no rows in the step gets one row without actions, because it must take part
        in the collective forward passes.
        """
        rows = job.steps[number]
        batch = job.experience.select(rows or [0])
        if not rows:
            batch = replace(batch, action_mask=torch.zeros_like(batch.action_mask))
        return batch.split(self.micro_batches(batch.lengths))

    def micro_batches(self, lengths: Tensor) -> list[list[int]]:
        """Return the rows of each micro-batch of an optimizer step.

        With a token budget, all ranks must call this method, and all ranks that have enough rows
        get the same number of micro-batches. A rank with fewer micro-batches would have to repeat
        its last micro-batch, because backward passes are collective under ZeRO 2 and 3.
        """
        limits = self.train_limits
        rows = limits.cut(lengths)
        if limits.max_tokens:
            [most] = self.strategy.all_reduce([len(rows)], "max")
            rows = limits.cut(lengths, at_least=int(most))
        return rows

    def has_moved_enough(self, metrics: Metrics) -> bool:
        """Return whether to skip the remaining optimizer steps of the update.

        Every rank returns the same answer.
        """
        return False

    def checkpoint_bytes(self) -> int:
        """Return the estimated size of this role's checkpoint.

        The estimate includes the model that --ckpt.save_hf exports with the checkpoint.
        """
        estimate = self.engine.checkpoint_bytes
        if self.config.ckpt.save_hf and self.name == "actor":
            estimate += exported_bytes(self.engine)
        return estimate

    def save_checkpoint(self, directory: str, tag: str) -> None:
        """Write the weights, EMA, optimizer state, schedule state and random state. Collective."""
        self.engine.save(directory, tag)

    def load_checkpoint(self, directory: str, tag: str) -> None:
        """Restore the state written by `save_checkpoint`. Collective."""
        self.engine.load(directory, tag)

    def export(self, tokenizer: PreTrainedTokenizerBase, path: str, final: bool = True) -> None:
        """Write the model, or only the adapters if the model has any. Collective.

        `final` marks the run's last export.
        """
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
    """Write an engine's model, and compare the written files with the model. Collective.

    If the run keeps an exponential moving average of the weights, the average is written. Raises
    ExportError if a file cannot be written, or if the files of a `final` export do not match the
    trained model.
    """
    strategy = engine.strategy
    with engine.awake(), engine.averaged():
        logits: Tensor | None = None
        if final and not strategy.config.load_in_4bit:
            logits = probe_logits(engine.hf)
        averages: Mapping[str, Tensor] = {}
        if engine.average:
            averages = engine.average.whole_weights
        trained = TrainedState(
            logits=logits,
            precision=strategy.config.param_dtype,
            max_len=getattr(engine.module, "max_len", None),
            averages=averages,
        )
        buckets = exported_parameters(engine, bucket_bytes, masters=masters)
        export_hf(
            buckets,
            engine.hf,
            tokenizer,
            path,
            writes=strategy.is_main,
            trained=trained,
            final=final,
        )
        strategy.barrier()
