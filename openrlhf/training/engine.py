"""Wraps a DeepSpeed engine that trains a model with our own accumulation windows.

An accumulation window is the set of micro-batches of one optimizer step. The window defines the
loss denominator: counts are summed over all of its micro-batches and all data-parallel ranks before
the first forward pass, so that the result does not depend on how the window is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.config.choices import OPTIMIZERS
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.observability.metrics import Metric, merge_all
from openrlhf.training import devices, ds_config
from openrlhf.training.averaging import WeightAverage, rank_file
from openrlhf.training.drive import state_on_drive
from openrlhf.training.masters import ChangedWeights, restore_masters, round_new_weights
from openrlhf.training.muon import Muon
from openrlhf.training.nonfinite import LossTerm, NonFiniteError, describe_cause, watched_gradients
from openrlhf.training.optimizers import (
    MovableState,
    make_optimizer,
    make_schedule,
    match_step_counters,
    repeat_steps,
)
from openrlhf.training.quiet_deepspeed import OffloadStateTypeEnum
from openrlhf.training.random_state import random_state, restore_random_state
from openrlhf.training.strategy import Strategy, initialize
from openrlhf.training.universal import converted, is_sharded_differently

Totals = Mapping[str, float]  # counts of tokens or sequences by name
Metrics = dict[str, Metric]
M = TypeVar("M")  # a micro-batch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of an optimizer step. A step is skipped if its gradient norm is not finite."""

    applied: bool
    grad_norm: float  # gradient norm before clipping
    lr: float
    # The fraction of rounded weights changed by the step.
    # None for skipped steps and in float32, where weights are not rounded.
    changed: float | None = None
    metrics: Metrics = field(default_factory=dict)


class TrainEngine:
    """A DeepSpeed engine that trains a model with our own accumulation windows."""

    def __init__(
        self,
        strategy: Strategy,
        load: Callable[[], nn.Module],
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        name: str = "model",
    ) -> None:
        """Load a model with `load`, and create its optimizer and schedule.

        In error messages, the model is called `name`.
        """
        ds = strategy.config
        ranks = strategy.layout.world_size
        config = ds_config.training_config(ds, max_norm=optimizer.max_norm, ranks=ranks)
        self._drive = state_on_drive(ds)  # None if all state is in memory
        on_drive = self._drive or nullcontext()
        with on_drive, strategy.loading(config):
            module = strategy.share_sequences(load())
            # Transformers loads models in evaluation mode.
            # Evaluation mode disables dropout and gradient checkpointing.
            module.train()
        is_rounded = ds.param_dtype == "bf16"  # True if weights have float32 master weights
        unrounded: dict[str, Tensor] = {}
        if is_rounded:
            unrounded = round_new_weights(module)
        wrapped = make_optimizer(module, optimizer, offload=ds.offloads_optimizer)
        with on_drive:
            engine = initialize(
                config,
                module,
                optimizer=wrapped,
                lr_scheduler=lambda scheduled: make_schedule(scheduled, optimizer, total_steps),
            )
        if isinstance(wrapped, Muon):
            wrapped.attach(engine.optimizer, strategy.device)
        self.changes: ChangedWeights | None = None  # None if weights are not rounded
        if is_rounded:
            restore_masters(engine.module, unrounded)
            self.changes = ChangedWeights(engine.module)
        self.deepspeed = engine
        self.strategy = strategy
        self.name = name
        self.sleeps = ds.sleeps  # True if the training state is in CPU memory between uses
        self.sharded = ds.zero_stage == 3  # True if each rank has a shard of every weight
        # True if some weights are frozen.
        self.partial = not all(p.requires_grad for p in engine.module.parameters())
        engine.module.register_state_dict_post_hook(_drop_frozen)
        self.average: WeightAverage | None = None  # EMA to export instead of the weights
        self.nonfinite_steps = 0  # number of skipped steps so far
        self.nonfinite_in_a_row = 0  # number of skipped steps since the last applied step
        self._movable_state = wrapped if isinstance(wrapped, MovableState) else None
        # minimum size of the moments in a checkpoint, in bytes per weight
        self._moment_bytes = int(OPTIMIZERS[optimizer.optim].moment_bytes)
        # Stage 0 in float32 computes no gradient norm and does not check for non-finite gradients.
        self._has_zero_optimizer = ds.trained_stage(ranks) > 0
        engine.enable_backward_allreduce = self._has_zero_optimizer
        self._sleep()

    @property
    def module(self) -> nn.Module:
        """The trained model."""
        return self.deepspeed.module

    @property
    def hf(self) -> PreTrainedModel:
        """The unwrapped Transformers model, whose parameters are exported and published."""
        return cast(PreTrainedModel, self.module.get_submodule("hf"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.deepspeed(*args, **kwargs)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep optimizer state, gradients and master weights on the device until the block exits.

        Forward passes do not need this training state.
        """
        if self.sleeps:
            devices.note(f"{self.name} awake")
            self.deepspeed.reload_states()
            if self._movable_state:
                self._movable_state.move_state(self.strategy.device)
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        """If --ds.enable_sleep is set, move the training state to CPU memory.

        Forward passes do not need the training state.
        """
        if not self.sleeps:
            return
        states = list(OffloadStateTypeEnum)
        states.remove(OffloadStateTypeEnum.lp_params)
        # With ZeRO 3, DeepSpeed accepts only FusedAdam, although the code works with any optimizer.
        optimizer_class = type(self.deepspeed.optimizer.optimizer)
        with patch("deepspeed.ops.adam.fused_adam.FusedAdam", optimizer_class):
            self.deepspeed.offload_states(include=states)
        if self._movable_state:
            self._movable_state.move_state(torch.device("cpu"))
        devices.note(f"{self.name} asleep")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the model in evaluation mode, without dropout, until the block exits."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights with their EMA, if there is one, until the block exits. Collective.

        Exports run in this context.
        """
        with self.average.in_place() if self.average else nullcontext():
            self.free_gathered()
            yield
        self.free_gathered()

    def free_gathered(self) -> None:
        """Free gathered weights that ZeRO 3 keeps between uses, including prefetched weights."""
        if self.sharded:
            self.deepspeed.optimizer.empty_partition_cache()
            # the second copy of the weights (--ds.zpg)
            self.deepspeed.optimizer.invalidate_secondary_tensor()

    def optimize(
        self,
        window: Sequence[M],
        *,
        counts: Callable[[M], Totals],
        loss: Callable[[M, Totals], tuple[Tensor, Metrics]],
        before: Callable[[M], tuple[M, Totals]] | None = None,
        max_nonfinite: int = 3,
    ) -> StepResult:
        """Take one optimizer step over a window of micro-batches. Collective.

        `counts(micro)` returns the denominators of a micro-batch by name (tokens, sequences).
        `loss(micro, totals)` returns the micro-batch's contribution to the window's loss, already
        divided by the totals over the window and all ranks. `before(micro)` runs in a first pass
        over the window. The function returns the micro-batch, optionally with more columns, and
        numbers whose sums are added to the totals. Raises NonFiniteError after `max_nonfinite`
        skipped steps in a row.
        """
        [most] = self.strategy.all_reduce([len(window)], "max")
        # With ZeRO 2 and 3, all ranks must run the same number of backward passes.
        # A rank with fewer micro-batches repeats its last micro-batch with weight 0.
        rounds = int(most)
        sums: dict[str, float] = {}
        if before:
            window, sums = self._first_pass(window, before, rounds)
        totals = self._sum_over_ranks([counts(micro) for micro in window])
        if not any(totals.values()):
            return StepResult(applied=False, grad_norm=0.0, lr=self._lr())
        for name, total in totals.items():
            totals[name] = total or 1.0  # avoids division by zero if there are no terms
        totals |= sums
        terms: list[LossTerm] = []
        with watched_gradients(self.module, enabled=self.nonfinite_in_a_row > 0) as broken:
            for turn in range(rounds):
                term, metrics = loss(window[min(turn, len(window) - 1)], totals)
                if turn < len(window):
                    # DeepSpeed averages gradients over the ranks, but the window needs their sum.
                    self.deepspeed.backward(term * self.strategy.layout.gradient_ranks)
                    terms.append(LossTerm(term.detach(), metrics))
                else:
                    self.deepspeed.backward(term * 0.0)
        return self._step(terms, broken, max_nonfinite)

    def _first_pass(
        self, window: Sequence[M], before: Callable[[M], tuple[M, Totals]], rounds: int
    ) -> tuple[list[M], dict[str, float]]:
        """Call `before` on the window `rounds` times on each rank, without gradient or dropout.

        Returns the new window, and the numbers summed over all ranks.
        """
        micros: list[M] = []
        numbers: list[Totals] = []
        with self.evaluating(), torch.no_grad():
            for turn in range(rounds):
                micro, micro_numbers = before(window[min(turn, len(window) - 1)])
                if turn < len(window):
                    micros.append(micro)
                    numbers.append(micro_numbers)
        return micros, self._sum_over_ranks(numbers)

    def _sum_over_ranks(self, numbers: Sequence[Totals]) -> dict[str, float]:
        """Return the sum of each number over the micro-batches of all ranks. Collective."""
        names = sorted(numbers[0])
        if not names:
            return {}
        sums: list[float] = []
        for name in names:
            sums.append(math.fsum(of_micro[name] for of_micro in numbers))
        return dict(zip(names, self.strategy.all_reduce(sums), strict=True))

    def _step(self, terms: list[LossTerm], broken: list[str], max_nonfinite: int) -> StepResult:
        """Apply the window's gradients, or skip and count the step if their norm is not finite."""
        lr = self._lr()
        changed: float | None = None
        if self.changes:
            self.changes.sample()
        grad_norm = self._apply_gradients()
        applied = math.isfinite(grad_norm)
        if applied:
            self.nonfinite_in_a_row = 0
            if self.average:
                self.average.update()
            if self.changes:
                # The ranks of a slice sample different weights, but only the ratio is used.
                moved, sampled = self.strategy.all_reduce(self.changes.count())
                changed = moved / sampled
        else:
            self.nonfinite_steps += 1
            self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row >= max_nonfinite:
            raise NonFiniteError(
                f"{self.nonfinite_in_a_row} optimizer step(s) of the {self.name} in a row were "
                "skipped because the loss or a gradient was NaN or infinite. In the last step, "
                f"{describe_cause(self.strategy, terms, broken)}. Lower the learning rate, check "
                "the rewards and data of these steps, or raise --train.max_nonfinite."
            )
        metrics = merge_all(term.metrics for term in terms)
        return StepResult(
            applied=applied, grad_norm=grad_norm, lr=lr, changed=changed, metrics=metrics
        )

    def _apply_gradients(self) -> float:
        """Apply the gradients if their norm is finite. Return the norm before clipping."""
        if self._has_zero_optimizer:
            with self._drive or nullcontext():  # the first step creates the moments
                # DeepSpeed skips the step if the gradient norm is not finite.
                self.deepspeed.step()
            if getattr(self.deepspeed.optimizer, "overflow", False):
                return math.inf
            norm = self.deepspeed.get_global_grad_norm()
            if norm is None:
                return math.inf
            return float(norm)
        self.deepspeed.buffered_allreduce_fallback()
        norm = nn.utils.get_total_norm(
            [p.grad for p in self.module.parameters() if p.grad is not None]
        )
        if norm.isfinite():
            self.deepspeed.step()
        else:
            self.deepspeed.zero_grad()
        return float(norm)

    def _lr(self) -> float:
        return float(self.deepspeed.get_lr()[0])

    def save(self, directory: str, tag: str) -> None:
        """Write the training state to `directory/tag`. Collective.

        The state consists of the trained weights, their EMA, the optimizer, schedule and random
        states, and the numbers of skipped steps.
        """
        skipped = {
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }
        with self.awake():
            self.deepspeed.save_checkpoint(
                directory,
                tag=tag,
                client_state=skipped,
                save_latest=False,
                exclude_frozen_parameters=self.partial,
            )
        torch.save(random_state(), rank_file(self.strategy, directory, tag, "random_state"))
        if self.average:
            self.average.save(directory, tag)
        self.strategy.barrier()

    def load(self, directory: str, tag: str) -> None:
        """Read the files written by `save`. Collective.

        The saved run must have used the same ZeRO stage; only stages 1 and 2 are interchangeable.
        Files from a different number of ranks are converted if --ds.use_universal_ckpt is set. The
        learning rate, the schedule and other optimizer settings come from this run's flags.
        """
        settings: list[dict[str, Any]] = []
        for group in self.deepspeed.optimizer.param_groups:
            given = dict(group)
            del given["params"]
            settings.append(given)
        converts = self.strategy.config.use_universal_ckpt and is_sharded_differently(
            Path(directory) / tag, self.strategy.layout
        )
        self.deepspeed._config.load_universal_checkpoint = converts
        source = converted(self.strategy, directory, tag) if converts else nullcontext(directory)
        on_drive = nullcontext()
        if self._drive:
            on_drive = self._drive.reading(self.deepspeed.optimizer.optimizer)
        with self.awake(), source as readable, on_drive:
            path, skipped = self.deepspeed.load_checkpoint(
                readable, tag=tag, load_module_strict=not self.partial
            )
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag} in {directory}")
        if converts:
            # With ZeRO 3, DeepSpeed uses the same tensor as the step counter of all parameters.
            # AdamW in CPU memory counts its steps with integers.
            for state in self.deepspeed.optimizer.state.values():
                state["step"] = deepcopy(state["step"])
        self._restore_settings(settings)
        optimizer = getattr(self.deepspeed.optimizer, "optimizer", self.deepspeed.optimizer)
        match_step_counters(optimizer)
        repeat_steps(optimizer)
        self.nonfinite_steps = skipped.get("nonfinite_steps", 0)
        self.nonfinite_in_a_row = skipped.get("nonfinite_in_a_row", 0)
        file = rank_file(self.strategy, directory, tag, "random_state")
        if file.exists():  # the saved run may have had fewer ranks
            restore_random_state(torch.load(file, weights_only=False))
        if self.average:
            self.average.load(directory, tag, reshard=converts and self.sharded)

    def _restore_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Restore each parameter group's settings, and set the schedule's current learning rate."""
        schedule = self.deepspeed.lr_scheduler
        groups = self.deepspeed.optimizer.param_groups
        for group, given, factor in zip(groups, settings, schedule.lr_lambdas, strict=True):
            group.update(given, lr=given["initial_lr"] * factor(schedule.last_epoch))
        schedule.base_lrs = [given["initial_lr"] for given in settings]

    @property
    def checkpoint_bytes(self) -> int:
        """The estimated size in bytes of the files written by `save` on all ranks.

        The files contain the trained weights, their master weights, and the optimizer's moments.
        """
        bytes_per_weight = self._moment_bytes
        if not self.sharded:  # ZeRO 3 writes only the master weights
            bytes_per_weight += self.hf.dtype.itemsize
        if self._has_zero_optimizer or self.hf.dtype != torch.float32:
            bytes_per_weight += 4
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return bytes_per_weight * sum(getattr(p, "ds_numel", p.numel()) for p in trained)


def _drop_frozen(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    """Remove frozen weights, including the aliases of tied weights that DeepSpeed keeps."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(name, None)
