"""The layout of ranks: each rank's part of the data, of each sequence and of each weight.

All functions are pure and need no process group or device.
"""

from dataclasses import dataclass

from openrlhf.config import training_rules
from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The numbers of data slices (`dp`), ranks per sequence (`sp`) and ranks per weight (`tp`).

    Consecutive ranks split a weight, and consecutive groups of these ranks split a sequence, so
    that the heaviest communication stays on one node.

    Example with dp 2, sp 1, tp 2: ranks 0 and 1 work on slice 0, and ranks 2 and 3 work on slice 1.
    Ranks 0 and 2 have the same half of the weights and sum their gradients.
    """

    dp: int
    sp: int = 1
    tp: int = 1

    @classmethod
    def from_flags(cls, ds: DeepSpeedConfig, *, processes: int) -> "RankLayout":
        """Return the layout of `processes` ranks for the sequence and tensor parallelism flags.

        Raises UserError if the number of processes is not a multiple of the ranks per data slice.
        """
        layout = cls(dp=ds.data_slices(processes), sp=ds.ring_attn_size, tp=ds.tensor_parallel_size)
        if layout.world_size != processes:
            raise UserError(*training_rules.process_violations(ds, processes))
        return layout

    @property
    def ranks_per_slice(self) -> int:
        """The number of ranks that work on the same data slice."""
        return self.sp * self.tp

    @property
    def world_size(self) -> int:
        """The total number of ranks."""
        return self.dp * self.ranks_per_slice

    def rings(self) -> list[tuple[int, ...]]:
        """Return the ranks of each ring, which share the sequences of a data slice."""
        rings: list[tuple[int, ...]] = []
        for slice_ranks in self.slice_ranks():
            rings += [tuple(slice_ranks[first :: self.tp]) for first in range(self.tp)]
        return rings

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks over which DeepSpeed averages the gradient of a weight."""
        return self.dp * self.sp

    def slice_ranks(self) -> list[list[int]]:
        """Return the ranks of each data slice. The first rank reports the results of its slice."""
        size = self.ranks_per_slice
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def noise_seed(self, seed: int, rank: int) -> int:
        """Return a rank's dropout seed. Ranks that split a weight have the same seed."""
        return seed + rank // self.tp
