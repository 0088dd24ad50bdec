"""The ranks that share each sequence, and the blocks that they send each other.

Strategies create rings, and models use them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One rank's view of the ring of ranks that share each sequence."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # ranks in the order in which keys and values travel
    rank: int  # this rank's index in `ranks`

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def source(self, turn: int) -> int:
        """Return the rank whose keys this rank holds after `turn` shifts."""
        return (self.rank - turn) % self.size

    def shift(self, block: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start sending a block to the next rank and receiving the previous rank's block.

        Returns the buffer of the received block, and the requests to wait for. `block` must not
        change before the requests have completed.
        """
        received = torch.empty_like(block)
        following = self.ranks[(self.rank + 1) % self.size]
        preceding = self.ranks[self.rank - 1]
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, following, self.group),
                dist.P2POp(dist.irecv, received, preceding, self.group),
            ]
        )
        return received, requests

    def sum(self, block: Tensor) -> Tensor:
        """Return the sum of a block over the ring. Collective.

        In the backward pass, every rank keeps its own gradient, so all ranks must compute the same
        loss from the sum and then add up the gradients of their parameters.
        """
        summed: Any = _Sum.apply(block, self.group)
        return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = block.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return gradient, None
