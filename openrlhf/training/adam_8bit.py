"""AdamW with 8-bit moments, from bitsandbytes, which is an optional package."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import Tensor

BLOCK = 256  # number of moments that share a scale in bitsandbytes
# Number of moments per chunk. On a CPU, bitsandbytes would convert all moments of a tensor at once.
CPU_CHUNK = 4096 * BLOCK
# States with one element per weight, and states with one element per block.
MOMENTS = ("state1", "state2")
SCALES = ("absmax1", "absmax2")


class Adam8bit(AdamW8bit):
    """AdamW with 8-bit moments for the groups with `is_8bit`, and 32-bit moments for all others.

    In bitsandbytes, the number of bits depends on the size of a tensor. Here, the number of bits
    depends on the group, because ZeRO merges all weights of a group into one flat tensor.

    Dettmers et al. 2021, arXiv:2110.02861
    """

    def __init__(self, groups: list[dict[str, Any]], **adam: Any) -> None:
        super().__init__(groups, min_8bit_size=0, **adam)

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a parameter, with the number of bits of its group."""
        bits = 8 if group["is_8bit"] else 32
        return super().get_config(gindex, pindex, group) | {"optim_bits": bits}

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Update a parameter. On a CPU, the parameters are updated in chunks to save memory."""
        if p.device.type != "cpu":
            super().update_step(group, p, gindex, pindex)
            return
        assert p.grad is not None
        state = self.state[p]
        p.data = p.data.contiguous()
        weights = p.detach().view(-1)
        gradients = p.grad.contiguous().view(-1)
        for start in range(0, len(weights), CPU_CHUNK):
            span = slice(start, start + CPU_CHUNK)
            chunk = weights[span]
            chunk.grad = gradients[span]
            self.state[chunk] = _state_of_chunk(state, span)
            super().update_step(group, chunk, gindex, pindex)
            del self.state[chunk]
        state["step"] += 1

    def move_state(self, device: torch.device) -> None:
        """Move the moments to `device`."""
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)


def _state_of_chunk(state: dict[str, Any], span: slice) -> dict[str, Any]:
    """Return views of the state of a chunk, which begins at a block boundary."""
    chunk = dict(state)
    for name in MOMENTS:
        chunk[name] = state[name].view(-1)[span]
    for name in SCALES:
        if name in state:
            chunk[name] = state[name][span.start // BLOCK : -(-span.stop // BLOCK)]
    return chunk
