"""PPO-ptx: a language-modeling loss on plain text, added to the policy loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from openrlhf.core.batches import TokenRows
from openrlhf.data.batching import ResumableSampler, row_costs
from openrlhf.data.sft import SFTDataset
from openrlhf.trainers.update_plan import distribute


@dataclass(eq=False, repr=False)
class PretrainingMix:
    """Draws `batch_size` rows of text for each optimizer step. Every epoch is reshuffled.

    The rows depend only on the seed and the number of the optimizer step, so resuming a run
    requires no saved state.
    """

    rows: SFTDataset
    batch_size: int
    seed: int

    def draw(self, optimizer_step: int) -> list[int]:
        """Return the indices of the rows for an optimizer step."""
        first = optimizer_step * self.batch_size
        drawn: list[int] = []
        while len(drawn) < self.batch_size:
            order = ResumableSampler(
                len(self.rows), seed=self.seed, consumed=first + len(drawn), drop_last=False
            )
            drawn += islice(order, self.batch_size - len(drawn))
        return drawn

    def for_slices(
        self, optimizer_steps: Sequence[int], slices: int, *, attention_length: int | None = None
    ) -> list[list[TokenRows]]:
        """Return one batch per optimizer step for each slice.

        All slices have similar total `row_costs`. A slice without rows gets one row whose loss mask
        is all false.
        """
        per_slice: list[list[TokenRows]] = [[] for _ in range(slices)]
        for step in optimizer_steps:
            rows = [self.rows[row] for row in self.draw(step)]
            batch = TokenRows.from_lists(
                [row.tokens for row in rows], [row.loss_mask for row in rows]
            )
            costs = row_costs(batch.lengths.tolist(), attention_length)
            parts = distribute(costs, range(len(rows)), slices)
            for texts, places in zip(per_slice, parts, strict=True):
                part = batch.select(places or [0])
                if not places:
                    part = replace(part, loss_mask=torch.zeros_like(part.loss_mask))
                texts.append(part)
        return per_slice
