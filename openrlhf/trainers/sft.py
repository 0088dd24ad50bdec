"""Supervised fine-tuning: −log π of the response tokens.

The loss is averaged over all response tokens of an optimizer step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.supervised_losses import token_nll
from openrlhf.config.supervised import SFTConfig
from openrlhf.core.batches import TokenRows
from openrlhf.data.loading import Table
from openrlhf.data.sft import SFTDataset, SFTRow
from openrlhf.observability.metrics import Metric
from openrlhf.trainers.tasks import LanguageTask, offline_task
from openrlhf.workers.base import mean_of


@offline_task("sft")
class SFTTask(LanguageTask[SFTConfig, SFTRow, TokenRows]):
    """ℓ_t = −log π(token_t), averaged over the window's target tokens on all ranks."""

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
        """Return prompts with responses, conversations, or plain texts, depending on the flags."""
        plain = self.config.model.pretrain_mode_enable
        return SFTDataset(dataset, tokenizer, self.config.data, pretrain=plain)

    def has_format(self) -> bool:
        """Return False for plain text, which has no prompts."""
        return not self.config.model.pretrain_mode_enable

    def collate(self, rows: Sequence[SFTRow]) -> TokenRows:
        """Return dataset rows as one ragged batch."""
        return TokenRows.from_lists([row.tokens for row in rows], [row.loss_mask for row in rows])

    def counts(self, micro: TokenRows) -> dict[str, float]:
        """Return the number of target tokens, which is the denominator."""
        return {"tokens": float(micro.loss_mask.sum())}

    def loss(
        self, model: Any, micro: TokenRows, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's contribution to the mean over the window's target tokens."""
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        summed = token_nll(scores.logprobs, micro.loss_mask).sum()
        seen = float(micro.loss_mask.sum())
        metrics: dict[str, Metric] = {"train/gpt_loss": mean_of(summed, seen)}
        return self.share(summed, scores.aux_loss, seen, totals["tokens"], metrics)

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the evaluation loss, with a space in its name as in OpenRLHF."""
        return {"eval/eval gpt_loss": metrics["train/gpt_loss"]}
