"""A stand-in for a GPU: tensors on a second device that cannot be mixed with tensors on the CPU.

The stand-in claims the device `meta`, because autograd can run on it without a GPU, and computes
all operations on the CPU. As on a GPU, an operation with tensors on both devices raises an error,
except for numbers, indices and copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
aten: Any = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}


class Elsewhere(Tensor):
    """A tensor on the second device, whose values are in the CPU tensor `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        moved = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        moved.held = held
        return moved

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Elsewhere({self.held!r})"

    def tolist(self) -> Any:
        """Return the values, which torch itself does not support for a subclass."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return compute(func, args, dict(kwargs or {}))


class SecondDevice(TorchDispatchMode):
    """Compute everything on the second device on the CPU until the block exits.

    `reads` are the operations whose results depend on values that are read back from the device,
    which makes a CPU wait for a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._literals = _Literals()

    def __enter__(self) -> SecondDevice:
        self._literals.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        result = compute(func, args, options)
        if _on_device((args, options)):
            if func in READS or _selects_with_mask(func, args) or not _on_device(result):
                self.reads.append(str(func))
        return result


def move(module: nn.Module) -> nn.Module:
    """Move a module to the second device. Tied weights stay tied."""
    moved: dict[Tensor, Tensor] = {}
    for parameter in module.parameters():
        values = Elsewhere(parameter.detach().clone())
        moved[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            layer.register_parameter(name, cast(nn.Parameter, moved[parameter]))
        for name, buffer in list(layer.named_buffers(recurse=False)):
            layer._buffers[name] = Elsewhere(buffer)
    return module


class _Literals(TorchFunctionMode):
    """Create tensors from Python numbers on the second device through a copy."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and options.get("device") == DEVICE:
            del options["device"]
            return func(*args, **options).to(DEVICE)
        return func(*args, **options)


def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU. Its result is on the device on which a GPU would have it.

    Raises RuntimeError for an operation that a GPU cannot compute because of a tensor on the CPU,
    and for a copy to the CPU whose values may be read before they have arrived.
    """
    is_device = _on_device((args, kwargs))
    requested = kwargs.get("device")
    if requested is not None:
        to_device = torch.device(requested) == DEVICE
        if is_device and not to_device and kwargs.get("non_blocking"):
            raise RuntimeError("a copy to the CPU that does not wait may be read too early")
        is_device = to_device
        kwargs["device"] = torch.device("cpu")
    elif func is aten.copy_.default:
        is_device = isinstance(args[0], Elsewhere)
    elif is_device and func not in COPIES:
        checked = args
        if func in INDEXED:
            checked = [args[0], *args[2:3]]
        for tensor in tree_flatten((checked, kwargs))[0]:
            if isinstance(tensor, Tensor) and not isinstance(tensor, Elsewhere) and tensor.dim():
                raise RuntimeError(f"{func} got tensors on the CPU and on the second device")
    results = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if not is_device:
        return results
    known = {id(tensor.held): tensor for tensor in _elsewhere((args, kwargs))}

    def wrap(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        return known[id(result)] if id(result) in known else Elsewhere(result)

    return tree_map(wrap, results)


def _elsewhere(values: Any) -> list[Elsewhere]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Elsewhere)]


def _on_device(values: Any) -> bool:
    return bool(_elsewhere(values))


def _selects_with_mask(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation has an index whose length depends on the values of a mask."""
    return func in INDEXED and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )


def _held(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.held
    return value
