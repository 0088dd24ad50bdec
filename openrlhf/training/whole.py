"""Tensors of the plain model, with adapters merged and 4-bit weights dequantized."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.training import tensor_parallel


class WholeTensor(NamedTuple):
    """A tensor of the plain model, with the parameters from which the tensor is computed."""

    name: str
    shape: tuple[int, ...]
    parts: list[nn.Parameter]
    make: Callable[[], Tensor]  # must be called while no part is sharded

    def nbytes(self) -> int:
        """Return the size in bytes of the parts or of the float32 tensor, whichever is larger."""
        part_bytes = sum(math.prod(full_shape(p)) * p.element_size() for p in self.parts)
        return max(4 * math.prod(self.shape), part_bytes)


def is_adapter(name: str) -> bool:
    """Return whether the parameter with this name belongs to a LoRA adapter."""
    return ".lora_" in name


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has LoRA adapters."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def whole_tensors(model: nn.Module) -> Iterator[WholeTensor]:
    """Yield every parameter of the plain model under its plain name, and tied weights only once."""
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters():  # this iterator lists each tied weight once
        owner, adapted, leaf = name.rpartition(".base_layer.")
        if adapted and leaf == "weight":
            layer: Any = layers[owner]
            parts = [parameter]
            for layer_name, part in layer.named_parameters():
                if is_adapter(f"{owner}.{layer_name}"):
                    parts.append(part)
            yield WholeTensor(
                name=f"{owner}.weight",
                shape=(layer.out_features, layer.in_features),
                parts=parts,
                make=partial(merged, parameter, layer),
            )
        elif not is_adapter(name):
            yield _single_part(name.replace(".base_layer.", "."), parameter)


def trained_tensors(model: nn.Module) -> Iterator[WholeTensor]:
    """Yield every trained parameter."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield _single_part(name, parameter)


def _single_part(name: str, parameter: Any) -> WholeTensor:
    """Return the tensor of a parameter without adapters."""
    shape = full_shape(parameter)
    if hasattr(parameter, "quant_state"):
        shape = tuple(parameter.quant_state.shape)
    return WholeTensor(name, shape, [parameter], partial(dense, parameter))


@torch.no_grad()
def merged(weight: nn.Parameter, layer: Any) -> Tensor:
    """Return W + s·BA in float32, where s = α/r, or α/√r for rsLoRA.

    With DoRA, the rows of the sum are scaled to the learned magnitudes. Hu et al. 2021,
    arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024, arXiv:2402.09353
    """
    [a] = layer.lora_A.values()
    [b] = layer.lora_B.values()
    [scale] = layer.scaling.values()
    total = dense(weight).float() + scale * (dense(b.weight).float() @ dense(a.weight).float())
    for magnitude in layer.lora_magnitude_vector.values():
        total *= (magnitude.weight.float() / total.norm(dim=1))[:, None]
    return total


def dense(parameter: Any) -> Tensor:
    """Return all values of a parameter, dequantized if they are stored in 4 bits.

    If tensor parallelism splits the weight, all ranks must call this function.
    """
    if not hasattr(parameter, "quant_state"):
        return tensor_parallel.joined(parameter, parameter.data)
    from bitsandbytes.functional import dequantize_4bit  # only with --ds.load_in_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the unsharded parameter.

    ZeRO 3 replaces the parameter with an empty placeholder, and tensor parallelism splits it.
    """
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return tensor_parallel.split_shape(parameter, shape)
