"""The tensors of the plain model: adapters merged, weights of 4 bits unpacked."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Whole(NamedTuple):
    """A tensor of the plain model: its name, its shape, the parameters that it is made of, and how."""

    name: str
    shape: tuple[int, ...]
    parts: list[nn.Parameter]
    make: Callable[[], Tensor]  # for when all parts are whole

    @property
    def nbytes(self) -> int:
        """Bytes of what it is made of, or of the tensor itself in float32 if that is more."""
        return max(
            4 * math.prod(self.shape),
            sum(math.prod(full_shape(p)) * p.element_size() for p in self.parts),
        )


def whole_tensors(model: nn.Module) -> Iterator[Whole]:
    """Every parameter of the plain model, by its name there. Tied weights come once."""
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters():  # names each tied weight once
        owner, adapted, leaf = name.rpartition(".base_layer.")
        if adapted and leaf == "weight":
            layer: Any = layers[owner]
            adapters = [part for own, part in layer.named_parameters() if own.startswith("lora_")]
            shape = (layer.out_features, layer.in_features)
            yield Whole(
                f"{owner}.weight", shape, [parameter, *adapters], partial(merged, parameter, layer)
            )
        elif ".lora_" not in name:
            yield _as_it_is(name.replace(".base_layer.", "."), parameter)


def trained_tensors(model: nn.Module) -> Iterator[Whole]:
    """Every trained parameter."""
    return (
        _as_it_is(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _as_it_is(name: str, parameter: Any) -> Whole:
    packed = hasattr(parameter, "quant_state")
    shape = tuple(parameter.quant_state.shape) if packed else full_shape(parameter)
    return Whole(name, shape, [parameter], partial(dense, parameter))


@torch.no_grad()
def merged(weight: nn.Parameter, layer: Any) -> Tensor:
    """W + s·BA, in float32; s = α/r, or α/√r for rsLoRA. DoRA scales the rows of the sum to its
    magnitudes.

    Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024,
    arXiv:2402.09353
    """
    (a,), (b,), (scale,) = layer.lora_A.values(), layer.lora_B.values(), layer.scaling.values()
    total = dense(weight).float() + scale * (b.weight.float() @ a.weight.float())
    for magnitude in layer.lora_magnitude_vector.values():
        total *= (magnitude.weight.float() / total.norm(dim=1))[:, None]
    return total


def dense(parameter: Any) -> Tensor:
    """The values of a parameter, unpacked if they are held in 4 bits."""
    if not hasattr(parameter, "quant_state"):
        return parameter.data
    from bitsandbytes.functional import dequantize_4bit  # optional: only with --ds.load_in_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter. ZeRO 3 stores the shape in an empty placeholder."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
