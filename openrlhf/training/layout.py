"""Which rank has which part of the data, of a sequence and of a weight. Pure: no process group, no
device.
"""

from dataclasses import dataclass
from typing import NamedTuple

from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig


class Place(NamedTuple):
    """A rank's position on each axis."""

    dp: int  # its data slice
    sp: int  # its part of every sequence of the slice
    tp: int  # its part of every split weight


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """`dp` data slices, every sequence split over `sp` ranks, every split weight over `tp` ranks.

    Neighbouring ranks split a weight, the ranks next to them a sequence: the busiest traffic stays
    on one node.

    Example, dp 2, sp 1, tp 2: ranks 0 and 1 work on slice 0, ranks 2 and 3 on slice 1. Ranks 0 and
    2 have the same half of the weights, and sum their gradients.
    """

    dp: int
    sp: int = 1
    tp: int = 1

    @classmethod
    def from_flags(cls, ds: DeepSpeedConfig, *, processes: int) -> "RankLayout":
        """Return the layout of a number of processes: --ds.ring_attn_size of them share a sequence,
        --ds.tensor_parallel_size a weight.

        Raises UserError if the processes cannot be divided so.
        """
        layout = cls(dp=ds.data_slices(processes), sp=ds.ring_attn_size, tp=ds.tensor_parallel_size)
        if layout.world_size != processes:
            raise UserError(
                f"{processes} process(es) cannot be divided by --ds.ring_attn_size {layout.sp} x "
                f"--ds.tensor_parallel_size {layout.tp}: start a multiple of {layout.sp * layout.tp}."
            )
        return layout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.sp * self.tp

    def place(self, rank: int) -> Place:
        """The position of a rank on each axis."""
        return Place(
            dp=rank // (self.sp * self.tp), sp=rank // self.tp % self.sp, tp=rank % self.tp
        )

    def slice_ranks(self) -> list[list[int]]:
        """The ranks that work on each data slice. Results are taken from the first rank of a slice."""
        size = self.sp * self.tp
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def noise_seed(self, seed: int, rank: int) -> int:
        """The seed of a rank's random numbers (dropout): one per data slice and part of a sequence."""
        return seed + rank // self.tp
