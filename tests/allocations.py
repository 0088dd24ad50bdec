"""Sizes of the tensors that operations return."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """A mode that records the element count of the largest tensor that any operation returns.

    Operations in backward passes are included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result
