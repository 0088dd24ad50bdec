"""PPO-ptx: plain text that the policy learns together with its rewards."""

from collections.abc import Sequence
from itertools import islice

from openrlhf.core.batches import TokenRows
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.sft import SFTDataset
from openrlhf.trainers.update_plan import share


class PretrainingMix:
    """Draws `batch_size` rows of text for each optimizer step. Every epoch has its own order.

    The rows depend only on the seed and the number of the optimizer step, so a resumed run needs no
    state.
    """

    def __init__(self, rows: SFTDataset, *, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed

    def draw(self, step: int) -> list[int]:
        """Row numbers of optimizer step `step`."""
        first, drawn = step * self.batch_size, list[int]()
        while len(drawn) < self.batch_size:
            order = ResumableSampler(
                len(self.rows), seed=self.seed, consumed=first + len(drawn), drop_last=False
            )
            drawn += islice(order, self.batch_size - len(drawn))
        return drawn

    def for_ranks(self, steps: Sequence[int], ranks: int) -> list[list[TokenRows]]:
        """For each rank, its rows of each optimizer step. A rank without rows gets one row with an
        empty loss mask.
        """
        per_rank: list[list[TokenRows]] = [[] for _ in range(ranks)]
        for step in steps:
            texts = [self.rows[row] for row in self.draw(step)]
            for rank, mine in enumerate(
                share([len(text.tokens) for text in texts], range(len(texts)), ranks)
            ):
                tokens = [texts[i].tokens for i in mine or [0]]
                masks = [texts[i].loss_mask for i in mine] or [[False] * len(tokens[0])]
                per_rank[rank].append(TokenRows.from_lists(tokens, masks))
        return per_rank
