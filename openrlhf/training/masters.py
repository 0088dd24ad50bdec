"""Float32 master weights: the optimizer updates them, and a bfloat16 model holds the rounded
values.

DeepSpeed initializes the masters from the rounded weights, so a float32 checkpoint would lose its
low bits before the first step. `restore_masters` restores them. Each rank has the masters for a
part of every weight: its shard with ZeRO 3, or the elements in its partition of the optimizer state
with ZeRO 1 and 2.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.training import tensor_parallel
from openrlhf.training.quiet_deepspeed import deepspeed
from openrlhf.training.stored import read_stored_weights
from openrlhf.training.whole import full_shape, is_adapter

# Maximum number of weights sampled by each rank. The sample takes 8 MB in bfloat16.
# If 1 % of the weights change, the sample measures this fraction to within 0.005 %.
MAX_SAMPLED_WEIGHTS = 4_000_000


def round_new_weights(module: nn.Module) -> dict[str, Tensor]:
    """Round trained float32 weights to bfloat16, and return their exact values by name.

    Models are loaded in bfloat16. Float32 weights belong to new adapters and scalar heads, or are
    weights that Transformers keeps in float32, which DeepSpeed would round too.
    """
    exact: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        is_sharded = hasattr(parameter, "ds_id")
        if parameter.requires_grad and parameter.dtype == torch.float32 and not is_sharded:
            exact[name] = parameter.data
            parameter.data = parameter.data.bfloat16()
    return exact


@torch.no_grad()
def restore_masters(module: nn.Module, new: Mapping[str, Tensor]) -> None:
    """Set the masters of a DeepSpeed engine's module to their values before rounding.

    The values come from `new`, the result of `round_new_weights`, and from the model's files. A
    weight that differs from the rounded value in the files keeps its master.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, value in new.items():
        set_own_master(trained[name], own_part(trained[name], value))
    hf = getattr(module, "hf", None)
    stored = [name for name in trained if name not in new and not is_adapter(name)]
    if not stored or not isinstance(hf, PreTrainedModel) or not hf.name_or_path:
        return
    weights = dict(hf.named_parameters(remove_duplicate=False))

    def restore(name: str, value: Tensor) -> None:
        weight = weights.get(name)
        if weight is None or not weight.requires_grad or value.dtype == weight.dtype:
            return
        if value.shape != full_shape(weight):
            return
        exact = own_part(weight, value).to(weight.device, torch.float32)
        if torch.equal(exact.to(weight.dtype), own_weight(weight).to(weight.device)):
            set_own_master(weight, exact)

    read_stored_weights(hf, restore)


class ChangedWeights:
    """Counts the rounded weights changed by a step, in an evenly spaced sample.

    If a rank has at most `MAX_SAMPLED_WEIGHTS` trained weights, the sample contains all of them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        total = sum(own_weight(parameter).numel() for parameter in self._parameters)
        stride = max(1, total // MAX_SAMPLED_WEIGHTS)
        self._stride = stride | 1  # an odd stride does not align with matrix columns
        self._before: Tensor = self._weights()

    def sample(self) -> None:
        """Store a copy of the sampled weights before a step."""
        self._before = self._weights()

    def count(self) -> tuple[float, float]:
        """Return the number of weights that changed since `sample`, and the sample's size."""
        return float((self._weights() != self._before).sum()), float(len(self._before))

    def _weights(self) -> Tensor:
        return torch.cat([own_weight(parameter)[:: self._stride] for parameter in self._parameters])


def own_span(parameter: Any) -> slice:
    """Return this rank's span of the flattened weight. The span may be empty."""
    if hasattr(parameter, "ds_id"):
        size = parameter.ds_tensor.numel()
        end = parameter.ds_numel  # excludes the padding of the last shard
        start = min(dist.get_rank(parameter.ds_process_group) * size, end)
        return slice(start, min(start + size, end))
    if parameter._hp_mapping is None:
        return slice(0, 0)
    address = parameter._hp_mapping.lp_fragment_address
    return slice(address.start, address.start + address.numel)


def own_part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor with the unsharded weight's shape, flattened."""
    return tensor_parallel.part_of(parameter, whole).flatten()[own_span(parameter)]


def own_weight(parameter: Any) -> Tensor:
    """Return this rank's part of the rounded weight, flattened."""
    span = own_span(parameter)
    if hasattr(parameter, "ds_id"):
        return parameter.ds_tensor.data[: span.stop - span.start]
    return parameter.data.flatten()[span]


def set_own_master(parameter: Any, exact: Tensor) -> None:
    """Set the masters of this rank's part from a flat tensor. The rounded weight stays the same."""
    if hasattr(parameter, "ds_id"):
        padded = exact.new_zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
        padded[: len(exact)] = exact
        set_own_shard(parameter, padded)
    elif parameter._hp_mapping is not None:
        parameter._hp_mapping.get_hp_fragment().data.copy_(exact)


def own_shard(parameter: nn.Parameter) -> Tensor:
    """Return the masters of this rank's ZeRO 3 shard, flattened, with the last shard's padding."""
    shard: Any = deepspeed.utils.safe_get_local_fp32_param(parameter)
    return shard.detach()  # otherwise, the EMA would record a graph, and could not be resumed


def set_own_shard(parameter: nn.Parameter, exact: Tensor) -> None:
    """Set the masters of this rank's ZeRO 3 shard from a flat tensor with the shard's padding."""
    deepspeed.utils.safe_set_local_fp32_param(parameter, exact)


def whole_master(parameter: nn.Parameter) -> Tensor:
    """Return a weight's masters in the weight's shape, on every rank. Collective."""
    master: Any = deepspeed.utils.safe_get_full_fp32_param(parameter)
    return tensor_parallel.joined(parameter, master)
