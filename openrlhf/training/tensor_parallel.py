"""Tensor parallelism: DeepSpeed's AutoTP splits the weights of linear layers over ranks.

The layers to split by rows and by columns are listed in Transformers' tensor-parallel plan for the
architecture. Output heads, embeddings and experts are not split.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from openrlhf.layer_plan import COLUMN, REPLICATED, ROW, split_patterns


def complete_config(config: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with this model's plan if the weights are split.

    Raises UserError if the model cannot be split over the configured number of ranks.
    """
    split = config.get("tensor_parallel")
    if not split:
        return config
    model_config: Any = module.config
    specs = layer_specs(model_config, split["autotp_size"], module)
    plan = {"use_default_specs": False, "layer_specs": specs}
    return config | {"tensor_parallel": split | {"partition_config": plan}}


def layer_specs(config: PretrainedConfig, ranks: int, module: nn.Module) -> list[dict[str, Any]]:
    """Return how AutoTP splits a model's weights: name patterns, each with the dimension to split.

    An adapter's matrix B is split if its layer is split by columns, and its matrix A is split if
    its layer is split by rows. Raises UserError if the model cannot be split.
    """
    patterns = split_patterns(config, ranks)
    specs: list[dict[str, Any]] = []
    for style, kind, adapter in ((COLUMN, "column", "lora_B"), (ROW, "row", "lora_A")):
        names: list[str] = []
        for pattern in patterns[style]:
            names += [
                rf"{pattern}\.weight$",
                rf"{pattern}\.base_layer\.weight$",
                rf"{pattern}\.{adapter}\..*\.weight$",
            ]
        specs.append({"patterns": names, "partition_type": kind})
    if patterns[REPLICATED]:
        names = [rf"{pattern}\.weight$" for pattern in patterns[REPLICATED]]
        specs.append(
            {
                "patterns": names,
                "partition_type": "skip",
                # AutoTP cannot sum the gradients of frozen weights.
                "grad_allreduce": _are_trained(module, names),
            }
        )
    return specs


def _are_trained(module: nn.Module, patterns: list[str]) -> bool:
    """Return whether a parameter whose name matches one of the patterns is trained."""
    matches = re.compile("|".join(patterns)).match
    return any(p.requires_grad and matches(name) for name, p in module.named_parameters())


@contextmanager
def adapters_visible() -> Iterator[None]:
    """Make AutoTP process the layers inside PEFT's layers until the block exits.

    AutoTP would mistake a PEFT layer for a linear layer, because PEFT layers have a `weight`
    property.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # a slow import, needed only for adapters

    layer: Any = BaseTunerLayer
    weight = vars(layer)["weight"]
    del layer.weight
    try:
        yield
    finally:
        layer.weight = weight


# ---- split parameters


def split_shape(parameter: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the unsplit weight, given the shape of this rank's part."""
    split = _split(parameter)
    if split is None:
        return shape
    return tuple(split["logical_shape"])


def joined(parameter: Any, part: Tensor) -> Tensor:
    """Gather a weight from this rank's part.

    All ranks that split the weight must call this function.
    """
    split = _split(parameter)
    if split is None:
        return part
    layer: Any = parameter.gather_params.__self__
    return layer._all_gather_shards(part, split["partition_sizes"], split["partition_dim"])


def part_of(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor that has the shape of the unsplit weight."""
    split = _split(parameter)
    if split is None:
        return whole
    layer: Any = parameter.gather_params.__self__
    return whole.split(list(split["partition_sizes"]), split["partition_dim"])[layer.tp_index]


def _split(parameter: Any) -> dict[str, Any] | None:
    """Return AutoTP's description of how a parameter is split, or None if it is not split."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.ds_autotp_universal_checkpoint_meta
