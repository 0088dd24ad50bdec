"""Direct preference optimization: the policy should prefer the chosen answer of a pair more than the reference does."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES, Judged, Strength
from openrlhf.batches import Answers
from openrlhf.config.supervised import DPOConfig
from openrlhf.data.feedback import PairRow, PreferenceDataset
from openrlhf.data.first_look import TextFormat
from openrlhf.data.loading import Table
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.referenced import ReferencedTask, answers_of, pair_metrics
from openrlhf.trainers.tasks import offline_task


@offline_task("dpo")
class PreferenceTask(ReferencedTask[DPOConfig, PairRow]):
    """The loss of --model.loss_type per pair, mean over the window's pairs of all ranks."""

    root: ClassVar = DPOConfig
    sample_names: ClassVar = ("chosen", "rejected")
    objective: ClassVar = (
        "model.loss_type",
        "model.beta",
        "model.label_smoothing",
        "model.target_margin",
        "model.nll_loss_coef",
        "model.aux_loss_coef",
    )

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> PreferenceDataset:
        """Pairs of a chosen and a rejected answer to a prompt."""
        return PreferenceDataset(dataset, tokenizer, self.config.data, needs_prompt=True)

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """Unknown if the prompt is inside the texts, unless the texts are chat messages."""
        data = self.config.data
        return super().text_format(tokenizer, ending) if data.prompt_key or data.apply_chat_template else None

    @property
    def compares(self) -> bool:
        """Whether the loss of --model.loss_type reads a reference."""
        return self.config.needs_reference

    def frozen_paths(self) -> dict[str, str | None]:
        """The reference, if the loss reads one."""
        return super().frozen_paths() if self.compares else {}

    @property
    def precomputes(self) -> bool:
        """--ref.precompute."""
        return self.compares and self.config.ref.precompute

    def collate(self, rows: Sequence[PairRow]) -> Answers:
        """Rows of the dataset as one ragged batch: 2i is the chosen and 2i + 1 the rejected text of pair i."""
        tokens = [tokens for row in rows for tokens in (row.chosen, row.rejected)]
        known = [total for row in rows for total in row.reference]
        prompts = [row.prompt_length for row in rows for _ in (0, 1)]
        return answers_of(tokens, prompts, reference=torch.tensor(known) if known else None)

    def counts(self, micro: Answers) -> dict[str, float]:
        """The number of pairs, which is the denominator."""
        return {"pairs": micro.num_samples / 2}

    def loss(self, model: Any, micro: Answers, totals: Mapping[str, float]) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's part of the mean over the window's pairs, and its metrics."""
        flags = self.config.model
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        ours, tokens = micro.answer_sums(scores.logprobs), micro.answer_sums(micro.loss_mask.float())
        theirs = torch.zeros_like(ours) if micro.reference is None else micro.reference
        judged = Judged(policy=ours.view(-1, 2), reference=theirs.view(-1, 2), tokens=tokens.view(-1, 2))
        strength = Strength(beta=flags.beta, smoothing=flags.label_smoothing, target=flags.target_margin)
        losses = PREFERENCE_LOSSES[flags.loss_type].function(judged, strength)
        nll, pairs = -judged.means[:, 0], len(losses)
        summed = (losses + flags.nll_loss_coef * nll).sum()
        rewards = flags.beta * (ours - theirs).detach()
        metrics = pair_metrics(losses, rewards) | {"train/nll_loss": Mean(float(nll.detach().sum()), pairs)}
        return self.share(summed, scores.aux_loss, pairs, totals["pairs"], metrics)

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Loss and accuracy."""
        return {"eval/eval_loss": metrics["train/loss"], "eval/acc_mean": metrics["train/acc"]}
