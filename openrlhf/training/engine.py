"""A model in training: a DeepSpeed engine whose optimizer-step window is ours.

The window owns the denominator: counts are summed over all micro-batches of the window and all
data-parallel ranks before the first forward, so the result does not depend on how the window was
split.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.config.flags import UserError
from openrlhf.config.shared import OptimizerConfig
from openrlhf.observability.metrics import Metric, merge_all, values
from openrlhf.training import devices, ds_config
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.masters import ChangedShare, restore_masters, round_new_weights, whole_master
from openrlhf.training.optimizers import make_optimizer, make_schedule
from openrlhf.training.quiet_deepspeed import OffloadStateTypeEnum, deepspeed
from openrlhf.training.strategy import Strategy, initialize
from openrlhf.training.universal import converted, was_sharded_otherwise
from openrlhf.training.whole import Whole, trained_tensors, whole_tensors
from openrlhf.weights.buckets import cut_into_buckets

Totals = Mapping[str, float]
Metrics = dict[str, Metric]
M = TypeVar("M")  # a micro-batch
ROUNDED = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # by --ds.param_dtype: weights that have float32 masters
_Share = tuple[
    Tensor, Metrics
]  # the part of the window's loss that a micro-batch contributes, and its metrics


class NonFiniteError(UserError, RuntimeError):
    """The loss or gradient of too many optimizer steps in a row was NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one optimizer step. `grad_norm` is before clipping; a step without a finite
    norm was skipped.

    `changed`: the share of the rounded weights that the step changed. None in float32, where no
    weight is rounded, and for a skipped step.
    """

    applied: bool
    grad_norm: float
    lr: float
    changed: float | None = None
    metrics: Metrics = field(default_factory=dict)


class TrainEngine:
    """A model in training: a DeepSpeed engine whose optimizer-step window is ours."""

    def __init__(
        self,
        strategy: Strategy,
        load: Callable[[], nn.Module],
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        name: str = "model",
    ) -> None:
        """Load a model with `load` and give it an optimizer and a schedule. Error messages call the
        model `name`.
        """
        config = ds_config.training_config(
            strategy.config, max_norm=optimizer.max_norm, ranks=strategy.layout.world_size
        )
        with strategy.loading(config):
            module = (
                load().train()
            )  # Transformers loads in evaluation mode: without dropout and checkpointing
        rounded = ROUNDED.get(strategy.config.param_dtype)
        new = round_new_weights(module, rounded) if rounded else {}
        engine = initialize(
            config,
            module,
            optimizer=make_optimizer(
                module.named_parameters(), optimizer, offload=strategy.config.adam_offload
            ),
            lr_scheduler=lambda wrapped: make_schedule(wrapped, optimizer, total_steps),
        )
        if rounded:
            restore_masters(engine.module, new)
        self.changed_share = (
            ChangedShare(engine.module) if rounded else None
        )  # None: no weight is rounded
        self.engine, self.strategy, self.name = engine, strategy, name
        self._moments = 2 if optimizer.optim == "adam" else 1  # of each weight, at least
        self.sleeps = strategy.config.sleeps  # its training state is in CPU memory between uses
        self.partial = not all(
            p.requires_grad for p in engine.module.parameters()
        )  # some weights are frozen
        engine.module.register_state_dict_post_hook(_drop_frozen)
        self.sharded = strategy.config.zero_stage == 3  # each rank has a part of every weight
        self._wrapped = ds_config.training_stage(strategy.config, strategy.layout.world_size) > 0
        self.average: WeightAverage | None = None  # of the weights; exported in their place
        self.nonfinite_steps, self.nonfinite_in_a_row = (
            0,
            0,
        )  # skipped steps: all so far; since the last applied step
        # Stage 0 in float32 has neither a norm nor a guard against non-finite gradients of its own.
        engine.enable_backward_allreduce = self._wrapped
        self._sleep()

    @property
    def module(self) -> nn.Module:
        """The trained model."""
        return self.engine.module

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within it, optimizer state, gradients and float32 weights are on the device. Forwards do
        not need them.
        """
        if self.sleeps:
            devices.note(f"{self.name} awake")
            self.engine.reload_states()
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        """Move everything to CPU memory but the weights of forwards, if the engine sleeps."""
        if not self.sleeps:
            return
        states = [
            state for state in OffloadStateTypeEnum if state != OffloadStateTypeEnum.lp_params
        ]
        # Under ZeRO 3 DeepSpeed asks for its FusedAdam, but does the same for every optimizer.
        with patch(
            "deepspeed.ops.adam.fused_adam.FusedAdam", type(self.engine.optimizer.optimizer)
        ):
            self.engine.offload_states(include=states)
        devices.note(f"{self.name} asleep")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it, the model is in evaluation mode: without dropout."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the model has the average of its weights, if there is one: the weights to
        export. Collective.
        """
        with self.average.in_place() if self.average else nullcontext():
            self._forget_gathered()
            yield
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        """Free the whole weights that ZeRO 3 keeps between uses, of which some may be in flight."""
        if self.sharded:
            self.engine.optimizer.empty_partition_cache()

    @property
    def hf(self) -> PreTrainedModel:
        """The Transformers model inside all wrappers. Exports and publications read its parameters."""
        return cast(PreTrainedModel, self.module.get_submodule("hf"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def optimize(
        self,
        window: Sequence[M],
        *,
        counts: Callable[[M], Totals],
        loss: Callable[[M, Totals], tuple[Tensor, Metrics]],
        before: Callable[[M], tuple[M, Totals]] | None = None,
        max_nonfinite: int = 3,
    ) -> StepResult:
        """One optimizer step over a window of micro-batches.

        `counts(micro)` returns the denominators of a micro-batch by name (tokens, sequences).
        `loss(micro, totals)` returns the micro-batch's part of the window's loss, already divided
        by the totals over the window and all ranks. `before(micro)` is a first pass over the
        window: it returns the micro-batch, perhaps with more columns, and numbers, whose sums are
        among the totals too. Raises NonFiniteError after `max_nonfinite` skipped steps in a row.
        """
        [rounds] = self.strategy.all_reduce([len(window)], "max")
        window, sums = self._first_pass(window, before, int(rounds)) if before else (window, {})
        counted = self._summed([counts(micro) for micro in window])
        if not any(counted.values()):
            return StepResult(applied=False, grad_norm=0.0, lr=self._lr())
        totals = {
            name: total or 1.0 for name, total in counted.items()
        } | sums  # nothing ÷ 1 is nothing
        shares: list[_Share] = []
        with self._watched_gradients() as broken:
            for turn in range(int(rounds)):
                # Under ZeRO 2 and 3 all ranks run equally many backwards: a rank with fewer
                # micro-batches repeats its last one with weight 0.
                share, metrics = loss(window[min(turn, len(window) - 1)], totals)
                real = turn < len(window)
                self.engine.backward(
                    share * self.strategy.dp_size if real else share * 0.0
                )  # DeepSpeed takes means
                shares += [(share.detach(), metrics)] if real else []
        return self._step(shares, broken, max_nonfinite)

    def _first_pass(
        self, window: Sequence[M], before: Callable[[M], tuple[M, Totals]], rounds: int
    ) -> tuple[list[M], dict[str, float]]:
        """`before` over the window, without gradient and dropout. Every rank calls `before`
        `rounds` times.
        """
        with self.evaluating(), torch.no_grad():
            seen = [before(window[min(turn, len(window) - 1)]) for turn in range(rounds)][
                : len(window)
            ]
        return [micro for micro, _ in seen], self._summed([numbers for _, numbers in seen])

    def _summed(self, numbers: Sequence[Totals]) -> dict[str, float]:
        """The sums of the numbers by name, over the parts of all ranks. Collective."""
        names = sorted(numbers[0])
        sums = [math.fsum(part[name] for part in numbers) for name in names]
        return dict(zip(names, self.strategy.all_reduce(sums), strict=True)) if names else {}

    def _step(self, shares: list[_Share], broken: list[str], max_nonfinite: int) -> StepResult:
        lr, changed = self._lr(), None
        before = self.changed_share.sample() if self.changed_share else None
        if self._wrapped:
            self.engine.step()  # DeepSpeed itself skips a step whose norm is not finite
            norm = (
                None
                if getattr(self.engine.optimizer, "overflow", False)
                else self.engine.get_global_grad_norm()
            )
        else:
            self.engine.buffered_allreduce_fallback()
            norm = nn.utils.get_total_norm(
                [p.grad for p in self.module.parameters() if p.grad is not None]
            )
            self.engine.step() if norm.isfinite() else self.engine.zero_grad()
        grad_norm = math.inf if norm is None else float(norm)
        applied = math.isfinite(grad_norm)
        if applied and self.average:
            self.average.update()
        if applied and self.changed_share and before is not None:
            moved, sampled = self.strategy.all_reduce(self.changed_share.since(before))
            changed = moved / sampled
        self.nonfinite_steps += not applied
        self.nonfinite_in_a_row = 0 if applied else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= max_nonfinite:
            raise NonFiniteError(
                f"{self.nonfinite_in_a_row} optimizer step(s) of the {self.name} in a row had a loss or gradient that was NaN "
                f"or infinite. These steps were skipped. In the last one {self._culprit(shares, broken)}. "
                "Lower the learning rate, look at the rewards and data of these steps, or raise --train.max_nonfinite."
            )
        metrics = merge_all(metrics for _, metrics in shares)
        return StepResult(
            applied=applied, grad_norm=grad_norm, lr=lr, changed=changed, metrics=metrics
        )

    @contextmanager
    def _watched_gradients(self) -> Iterator[list[str]]:
        """Collects parameters whose gradient is not finite in a backward within it, the nearest to
        the loss first.

        ZeRO drops the gradients before their norm is known. Checking each gradient costs time, so
        the gradients are watched only after a skipped step.
        """
        broken: list[str] = []

        def look(name: str, gradient: Tensor) -> None:
            if not gradient.isfinite().all():
                broken.append(name)

        trained = [
            (name, p)
            for name, p in self.module.named_parameters()
            if p.requires_grad and self.nonfinite_in_a_row
        ]
        hooks = [parameter.register_hook(partial(look, name)) for name, parameter in trained]
        yield broken
        for hook in hooks:
            hook.remove()

    def _culprit(self, shares: list[_Share], broken: list[str]) -> str:
        """The first loss that was not finite on any rank, with its metrics; if all were finite, the
        gradients.
        """
        losses = [
            f"the loss of micro-batch {place} of {len(shares)} on rank {self.strategy.rank} was {float(share)} "
            f"({_not_finite(metrics) or 'its metrics were finite'})"
            for place, (share, metrics) in enumerate(shares, 1)
            if not share.isfinite()
        ]
        ranks = self.strategy.gather_ranks((losses, broken))
        if every := [loss for losses, _ in ranks for loss in losses]:
            return every[0]
        names = list(dict.fromkeys(name for _, broken in ranks for name in broken))
        which = f" of {', '.join(names[:3])} ({len(names)} parameter(s) in all)" if names else "s"
        return f"every loss was finite, but not the gradient{which}"

    def _lr(self) -> float:
        return float(self.engine.get_lr()[0])

    def save(self, directory: str, tag: str) -> None:
        """Write trained weights, their average, optimizer, schedule, random state and skipped steps
        to `directory/tag`. Collective.
        """
        skipped = {
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }
        with self.awake():
            self.engine.save_checkpoint(
                directory,
                tag=tag,
                client_state=skipped,
                save_latest=False,
                exclude_frozen_parameters=self.partial,
            )
        torch.save(random_state(), Path(directory) / tag / f"random_state_{self.strategy.rank}.pt")
        if self.average:
            self.average.save(directory, tag)
        self.strategy.barrier()

    def load(self, directory: str, tag: str) -> None:
        """Read the files of `save`, in a run with the same ZeRO stage, or 1 instead of 2 or 2
        instead of 1. Collective.

        Files of another number of ranks are converted if --ds.use_universal_ckpt allows it.
        Learning rate, schedule and the optimizer's other settings stay as the flags of this run
        say.
        """
        flags = [
            {key: each[key] for key in each.keys() - {"params"}}
            for each in self.engine.optimizer.param_groups
        ]
        checkpoint, ranks = Path(directory) / tag, self.strategy.layout.world_size
        convert = self.strategy.config.use_universal_ckpt and was_sharded_otherwise(
            checkpoint, ranks
        )
        self.engine._config.load_universal_checkpoint = convert
        universal = converted(self.strategy, directory, tag) if convert else nullcontext(directory)
        with self.awake(), universal as readable:
            path, skipped = self.engine.load_checkpoint(
                readable, tag=tag, load_module_strict=not self.partial
            )
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag} in {directory}")
        for state in self.engine.optimizer.state.values() if convert else ():
            state["step"] = state[
                "step"
            ].clone()  # DeepSpeed gives all parameters of ZeRO 3 one tensor to count in
        schedule = self.engine.lr_scheduler
        for group, given, factor in zip(
            self.engine.optimizer.param_groups, flags, schedule.lr_lambdas, strict=True
        ):
            group.update(given, lr=given["initial_lr"] * factor(schedule.last_epoch))
        schedule.base_lrs = [given["initial_lr"] for given in flags]
        self.nonfinite_steps = skipped.get("nonfinite_steps", 0)
        self.nonfinite_in_a_row = skipped.get("nonfinite_in_a_row", 0)
        noise = checkpoint / f"random_state_{self.strategy.rank}.pt"
        if noise.exists():  # not for a rank that did not exist
            restore_random_state(torch.load(noise, weights_only=False))
        if self.average:
            self.average.load(directory, tag)

    def full_parameters(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The parameters of the plain model in buckets, by their names in the Transformers model;
        adapters are merged.

        Collective over the ranks. The tensors of a bucket are valid until the next bucket is
        requested. Tied weights come once.
        """
        return self._gathered(whole_tensors(self.hf), bucket_bytes)

    def exported_parameters(
        self, bucket_bytes: int, *, masters: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield what `full_parameters` yields; for a model with adapters, the trained parameters
        unchanged.

        `masters`: the float32 masters instead of the rounded weights. The engine must be awake.
        """
        if not masters or self.changed_share is None:
            yield from self._gathered(self._exported_tensors(), bucket_bytes)
            return
        frozen: list[Whole] = []
        trained: list[Whole] = []
        for each in self._exported_tensors():
            if each.parts[0].requires_grad:
                trained.append(each)
            else:
                frozen.append(each)
        for bucket in cut_into_buckets(trained, lambda each: each.nbytes, bucket_bytes):
            yield [(each.name, whole_master(each.parts[0])) for each in bucket]
        for bucket in self._gathered(frozen, bucket_bytes):
            yield [(name, weight.float()) for name, weight in bucket]

    def _exported_tensors(self) -> Iterator[Whole]:
        return (trained_tensors if hasattr(self.hf, "peft_config") else whole_tensors)(self.hf)

    @property
    def checkpoint_bytes(self) -> int:
        """The size of the files of `save` on all ranks, estimated: trained weights, their masters,
        and the optimizer's moments.
        """
        weights = [p for p in self.module.parameters() if p.requires_grad]
        width = 4 * self._moments
        if not self.sharded:  # stage 3 writes the masters alone
            width += self.hf.dtype.itemsize
        if self._wrapped or self.hf.dtype != torch.float32:
            width += 4
        return sum(getattr(p, "ds_numel", p.numel()) for p in weights) * width

    @property
    def exported_bytes(self) -> int:
        """The size of an export: of the plain model, or of the adapters. An average in float32
        counts as the weights.
        """
        tensors = self._exported_tensors()
        width = self.hf.dtype.itemsize
        return sum(math.prod(each.shape) * width for each in tensors)

    def _gathered(
        self, tensors: Iterable[Whole], bucket_bytes: int
    ) -> Iterator[list[tuple[str, Tensor]]]:
        self._forget_gathered()
        for bucket in cut_into_buckets(tensors, lambda each: each.nbytes, bucket_bytes):
            parameters = [part for each in bucket for part in each.parts]
            with deepspeed.zero.GatheredParameters(parameters, enabled=self.sharded):
                yield [(each.name, each.make()) for each in bucket]


def _drop_frozen(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    """Take the frozen weights out of a checkpoint. DeepSpeed leaves the second names of tied ones
    there.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(name, None)


def _not_finite(metrics: Metrics) -> str:
    return ", ".join(
        f"{name} = {value}" for name, value in values(metrics).items() if not math.isfinite(value)
    )


def random_state() -> dict[str, Any]:
    """The states of all generators that a forward may use (dropout)."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to the states of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
