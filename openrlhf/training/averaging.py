"""An exponential moving average of the weights of a trained model, kept on the CPU."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from openrlhf.training.masters import (
    own_part,
    own_shard,
    set_own_master,
    set_own_shard,
    whole_master,
)
from openrlhf.training.strategy import Strategy

logger = logging.getLogger(__name__)


class WeightAverage:
    """p̄ ← β·p̄ + (1 − β)·p for every trained weight, in float32. The average starts at the current
    weights.

    In bfloat16 training, the float32 masters are averaged. With ZeRO 3 each rank averages its
    shards. Otherwise rank 0 averages whole weights.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, beta: float) -> None:
        self.beta, self.strategy = beta, strategy
        self.sharded = strategy.config.zero_stage == 3
        self.masters = strategy.config.param_dtype != "fp32"
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.averages = self._copied(torch.float32)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by name: this rank's shards with ZeRO 3, else whole ones. Collective."""
        for name, parameter in self.parameters.items():
            if not self.masters:
                yield name, _model_weight(parameter)
            elif self.sharded:
                yield name, own_shard(parameter)
            else:
                yield name, whole_master(parameter)

    def _copied(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copies of the weights that this rank averages."""
        averages = self.sharded or self.strategy.is_main
        return {name: held.to("cpu", dtype, copy=True) for name, held in self._held() if averages}

    def update(self) -> None:
        """Add the current weights to the average, once per applied optimizer step."""
        for name, held in self._held():
            if name in self.averages:
                self.averages[name].lerp_(held.float().cpu(), 1 - self.beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the model has the average as its weights, on every rank. Collective."""
        kept = self._copied()
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(kept)

    def _set(self, weights: dict[str, Tensor]) -> None:
        """Set the model's weights, and its masters if it has some, on every rank. Collective."""
        for name, parameter in self.parameters.items():
            held = _model_weight(parameter)
            weight = torch.empty_like(held, dtype=torch.float32)
            if name in weights:
                weight.copy_(weights[name])
            if not self.sharded:
                torch.distributed.broadcast(weight, src=0)
            held.copy_(weight)
            if self.masters and self.sharded:
                set_own_shard(parameter, weight)
            elif self.masters:
                set_own_master(parameter, own_part(parameter, weight))

    @property
    def whole_weights(self) -> dict[str, Tensor]:
        """The average by the names of the Transformers model; empty under ZeRO 3, where no rank has
        whole weights.
        """
        if self.sharded:
            return {}
        return {name.removeprefix("hf."): weight for name, weight in self.averages.items()}

    def save(self, directory: str, tag: str) -> None:
        """Write the average beside the engine's files."""
        if self.averages:
            torch.save(self.averages, self._file(directory, tag))

    def load(self, directory: str, tag: str) -> None:
        """Read the files of `save`. If the checkpoint has no average, the average starts at its
        weights.
        """
        file = self._file(directory, tag)
        if file.exists():
            self.averages = torch.load(file)
        elif self.averages:
            logger.warning(
                "%s has no average of the weights: it starts at the weights of this checkpoint.",
                file.parent,
            )
            self.averages = self._copied(torch.float32)

    def _file(self, directory: str, tag: str) -> Path:
        return Path(directory) / tag / f"average_{self.strategy.rank}.pt"


def _model_weight(parameter: nn.Parameter) -> Tensor:
    """Return the weight that the model computes with. ZeRO 3 leaves an empty parameter with the
    shard as an attribute.
    """
    return getattr(parameter, "ds_tensor", parameter).data
