"""PPO-ptx: a language-modeling loss on plain text, added to the policy loss."""

from collections.abc import Sequence
from itertools import islice

from openrlhf.core.batches import TokenRows
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.sft import SFTDataset
from openrlhf.trainers.update_plan import share


class PretrainingMix:
    """Draws `batch_size` rows of text for each optimizer step. Every epoch is reshuffled.

    The rows depend only on the seed and the optimizer step's number, so no state needs to be saved
    for a resumed run.
    """

    def __init__(self, rows: SFTDataset, *, batch_size: int, seed: int) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed

    def draw(self, step: int) -> list[int]:
        """Return the numbers of the rows for an optimizer step."""
        first = step * self.batch_size
        drawn: list[int] = []
        while len(drawn) < self.batch_size:
            order = ResumableSampler(
                len(self.rows), seed=self.seed, consumed=first + len(drawn), drop_last=False
            )
            drawn += islice(order, self.batch_size - len(drawn))
        return drawn

    def for_ranks(self, steps: Sequence[int], ranks: int) -> list[list[TokenRows]]:
        """Return each rank's rows, as one batch per optimizer step.

        A rank that would have no rows gets one row whose loss mask is all false.
        """
        per_rank: list[list[TokenRows]] = [[] for _ in range(ranks)]
        for step in steps:
            texts = [self.rows[row] for row in self.draw(step)]
            lengths = [len(text.tokens) for text in texts]
            for rank, places in enumerate(share(lengths, range(len(texts)), ranks)):
                tokens = [texts[place].tokens for place in places]
                masks = [texts[place].loss_mask for place in places]
                if not places:
                    tokens = [texts[0].tokens]
                    masks = [[False] * len(texts[0].tokens)]
                per_rank[rank].append(TokenRows.from_lists(tokens, masks))
        return per_rank
