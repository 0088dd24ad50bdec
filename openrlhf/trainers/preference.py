"""Direct preference optimization: the policy should prefer the chosen answer of a pair more than
the reference does.

Also what this task shares with others: the frozen reference and its log-probabilities, and pairs
that stay together.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES, Judged, Strength
from openrlhf.config.supervised import DPOConfig, KTOConfig, RMConfig
from openrlhf.core.batches import Answers
from openrlhf.data.feedback import PairRow, PreferenceDataset
from openrlhf.data.first_look import TextFormat
from openrlhf.data.loading import Table
from openrlhf.models.adapters import adapters_off
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.tasks import LanguageTask, Micro, OfflineTask, Row, offline_task

Referenced = TypeVar("Referenced", bound=DPOConfig | KTOConfig)
Paired = TypeVar("Paired", bound=DPOConfig | RMConfig)
REFERENCE = "--ref.model_name_or_path"


class ReferencedTask(LanguageTask[Referenced, Row, Answers], Generic[Referenced, Row]):
    """A language model that is compared with a frozen one. Rows 2i and 2i + 1 of a micro-batch
    belong together.
    """

    rows_per_group: ClassVar = 2

    def frozen_paths(self) -> dict[str, str | None]:
        """The reference, if the loss reads one, unless it is the trained model without its
        adapters.
        """
        loaded = self.config.needs_reference and not self.config.reference_is_policy
        return {REFERENCE: self.config.ref.model_name_or_path} if loaded else {}

    @property
    def offloads(self) -> bool:
        """--ref.offload."""
        return self.config.ref.offload

    def before(self, model: Any, micro: Answers) -> tuple[Answers, Mapping[str, float]]:
        """Σ log π_ref of the answers, unless it is known or not needed."""
        if micro.reference is not None or not self.config.needs_reference:
            return micro, {}
        reference = self.frozen.get(REFERENCE, model)
        with nullcontext() if REFERENCE in self.frozen else adapters_off(model.module):
            scores = reference(micro.tokens, micro.offsets, micro.loss_mask)
        return replace(micro, reference=micro.answer_sums(scores.logprobs)), {}


class PairTask(OfflineTask[Paired, PairRow, Micro], Generic[Paired, Micro]):
    """A task whose rows are pairs. Rows 2i and 2i + 1 of a micro-batch are the two texts of pair i."""

    sample_names: ClassVar = ("chosen", "rejected")
    rows_per_group: ClassVar = 2

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """Unknown if the prompt is inside the texts, unless the texts are chat messages."""
        data = self.config.data
        return (
            super().text_format(tokenizer, ending)
            if data.prompt_key or data.apply_chat_template
            else None
        )

    def prompt_column(self, dataset: Table) -> str | None:
        """The column of --data.prompt_key; the texts of pairs without it have their prompts."""
        return self.config.data.prompt_key

    def counts(self, micro: Micro) -> dict[str, float]:
        """The number of pairs, which is the denominator."""
        return {"pairs": micro.num_samples / 2}

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Loss and accuracy."""
        return {"eval/eval_loss": metrics["train/loss"], "eval/acc_mean": metrics["train/acc"]}


def pair_metrics(losses: Tensor, rewards: Tensor) -> dict[str, Metric]:
    """Return loss, accuracy and mean rewards of pairs. A tie is half right.

    Rewards 2i and 2i + 1 are those of the chosen and the rejected text of pair i.
    """
    chosen, rejected, pairs = rewards[0::2], rewards[1::2], len(losses)
    right = (chosen > rejected).float() + (chosen == rejected).float() / 2
    accuracy = Mean(float(right.sum()), pairs)
    return {
        "train/loss": Mean(float(losses.detach().sum()), pairs),
        "train/acc": accuracy,
        "train/acc_mean": accuracy,  # the same under the name of old dashboards
        "train/chosen_reward": Mean(float(chosen.sum()), pairs),
        "train/reject_reward": Mean(float(rejected.sum()), pairs),
    }


@offline_task("dpo")
class PreferenceTask(PairTask[DPOConfig, Answers], ReferencedTask[DPOConfig, PairRow]):
    """The loss of --model.loss_type per pair, mean over the window's pairs of all ranks."""

    root: ClassVar = DPOConfig
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

    @property
    def precomputes(self) -> bool:
        """--ref.precompute."""
        return self.config.needs_reference and self.config.ref.precompute

    def collate(self, rows: Sequence[PairRow]) -> Answers:
        """Rows of the dataset as one ragged batch: 2i is the chosen and 2i + 1 the rejected text of
        pair i.
        """
        tokens = [tokens for row in rows for tokens in (row.chosen, row.rejected)]
        known = [total for row in rows for total in row.reference]
        masks = [mask for row in rows for mask in row.masks]
        return Answers.from_lists(tokens, masks, reference=torch.tensor(known) if known else None)

    def loss(
        self, model: Any, micro: Answers, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's part of the mean over the window's pairs, and its metrics."""
        flags = self.config.model
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        ours, tokens = (
            micro.answer_sums(scores.logprobs),
            micro.answer_sums(micro.loss_mask.float()),
        )
        theirs = torch.zeros_like(ours) if micro.reference is None else micro.reference
        judged = Judged(
            policy=ours.view(-1, 2), reference=theirs.view(-1, 2), tokens=tokens.view(-1, 2)
        )
        strength = Strength(
            beta=flags.beta, smoothing=flags.label_smoothing, target=flags.target_margin
        )
        losses = PREFERENCE_LOSSES[flags.loss_type].function(judged, strength)
        nll, pairs = -judged.means[:, 0], len(losses)
        summed = (losses + flags.nll_loss_coef * nll).sum()
        gained = ours - theirs if self.config.needs_reference else judged.means.flatten()
        rewards = flags.beta * gained.detach()
        metrics = pair_metrics(losses, rewards) | {
            "train/nll_loss": Mean(float(nll.detach().sum()), pairs)
        }
        if self.config.needs_reference:
            metrics["train/chosen_logratio"] = Mean(float(gained.detach()[0::2].sum()), pairs)
        return self.share(summed, scores.aux_loss, pairs, totals["pairs"], metrics)
