"""An exponential moving average (EMA) of a trained model's weights, kept in CPU memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from openrlhf.reporting import warn
from openrlhf.training.masters import (
    own_part,
    own_shard,
    set_own_master,
    set_own_shard,
    whole_master,
)
from openrlhf.training.strategy import Strategy
from openrlhf.training.tensor_parallel import joined, part_of
from openrlhf.training.whole import full_shape
from openrlhf.training.zero3_files import Zero3Files


class WeightAverage:
    """The float32 average p̄ ← β·p̄ + (1 − β)·p of every trained weight.

    The average starts at the current weights. In bfloat16 training, the master weights are
    averaged. With ZeRO 3, each rank averages its own shards; otherwise, rank 0 averages the
    complete weights.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, beta: float) -> None:
        """Start an average at the current weights of `module`. Collective."""
        self.beta = beta
        self.strategy = strategy
        self.sharded = strategy.config.zero_stage == 3
        self.has_masters = strategy.config.param_dtype != "fp32"
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.averages = self._copy_weights(torch.float32)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each weight, and the weight (with ZeRO 3, this rank's shard of it).

        Collective.
        """
        for name, parameter in self.parameters.items():
            if self.sharded and self.has_masters:
                yield name, own_shard(parameter)
            elif self.sharded:
                yield name, _model_weight(parameter)
            elif self.has_masters:
                yield name, whole_master(parameter)
            else:
                yield name, joined(parameter, parameter.data)

    def _copy_weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return CPU copies of the weights averaged by this rank. Collective."""
        copies: dict[str, Tensor] = {}
        for name, weight in self._weights():
            if self.sharded or self.strategy.is_main:
                copies[name] = weight.to("cpu", dtype, copy=True)
        return copies

    def update(self) -> None:
        """Add the current weights to the average, once per applied optimizer step. Collective."""
        for name, weight in self._weights():
            if name in self.averages:
                self.averages[name].lerp_(weight.float().cpu(), 1 - self.beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights with the average until the block exits. Collective."""
        current = self._copy_weights()
        self._set_weights(self.averages)
        try:
            yield
        finally:
            self._set_weights(current)

    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        """Set the model's weights, and its master weights if any, on every rank. Collective."""
        for name, parameter in self.parameters.items():
            model_weight = _model_weight(parameter)
            device = model_weight.device
            if self.sharded:
                weight = weights[name].to(device, torch.float32)
                model_weight.copy_(weight)
                if self.has_masters:
                    set_own_shard(parameter, weight)
                continue
            weight = torch.empty(full_shape(parameter), dtype=torch.float32, device=device)
            if self.strategy.is_main:
                weight.copy_(weights[name])
            torch.distributed.broadcast(weight, src=0)
            model_weight.copy_(part_of(parameter, weight))
            if self.has_masters:
                set_own_master(parameter, own_part(parameter, weight))

    @property
    def whole_weights(self) -> dict[str, Tensor]:
        """The averaged weights, keyed by parameter name in the Transformers model.

        The mapping is empty with ZeRO 3, because no rank has the complete weights.
        """
        if self.sharded:
            return {}
        return {name.removeprefix("hf."): weight for name, weight in self.averages.items()}

    def save(self, directory: str, tag: str) -> None:
        """Write this rank's part of the average next to the engine's files."""
        if self.averages:
            torch.save(self.averages, rank_file(self.strategy, directory, tag, "average"))

    def load(self, directory: str, tag: str, *, reshard: bool = False) -> None:
        """Read the files written by `save`. Collective.

        If `reshard` is true, a different layout of ranks wrote the files with ZeRO 3. If the
        checkpoint has no average, the average restarts at the checkpoint's weights.
        """
        file = rank_file(self.strategy, directory, tag, "average")
        if reshard:
            file = file.with_name("average_0.pt")
        if file.exists() and reshard:
            self._load_resharded(Zero3Files(file.parent))
        elif file.exists():
            self.averages = torch.load(file)
        # Rank 0 decides for all ranks, because gathering the master weights is collective.
        if self.strategy.broadcast(file.exists()):
            return
        if self.averages:
            warn(
                f"{file.parent} has no weight average (EMA). The average restarts at this "
                "checkpoint's weights."
            )
        self.averages = self._copy_weights(torch.float32)

    def _load_resharded(self, files: Zero3Files) -> None:
        """Read this rank's shards from the files of all ranks of a different layout."""
        saved: list[dict[str, Tensor]] = []
        for rank in range(len(files.files)):
            saved.append(torch.load(files.folder / f"average_{rank}.pt", mmap=True))
        for name, parameter in self.parameters.items():
            whole = files.whole(name, [averages[name] for averages in saved])
            part = own_part(parameter, whole)
            average = torch.zeros_like(self.averages[name])  # includes the last shard's padding
            average[: len(part)] = part
            self.averages[name] = average


def rank_file(strategy: Strategy, directory: str, tag: str, name: str) -> Path:
    """Return the path of this rank's file `name` in the checkpoint `directory/tag`."""
    return Path(directory) / tag / f"{name}_{strategy.rank}.pt"


def _model_weight(parameter: nn.Parameter) -> Tensor:
    """Return the weight used in forward passes or, with ZeRO 3, this rank's shard of it."""
    return getattr(parameter, "ds_tensor", parameter).data
