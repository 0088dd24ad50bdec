"""Direct preference optimization (DPO) and related losses.

The policy learns to prefer each pair's chosen answer more strongly than the reference does. This
module also contains code shared with other tasks: a frozen reference with its log-probabilities,
and pairs whose two texts stay in the same micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES, Judged, Strength
from openrlhf.config.supervised import DPOConfig, KTOConfig, RMConfig
from openrlhf.core.batches import Answers
from openrlhf.data.feedback import PairRow, PreferenceDataset
from openrlhf.data.loading import Table
from openrlhf.models.adapters import adapters_off
from openrlhf.observability.metrics import Metric
from openrlhf.trainers.tasks import LanguageTask, Micro, OfflineTask, Row, offline_task
from openrlhf.workers.base import mean_of

Referenced = TypeVar("Referenced", bound=DPOConfig | KTOConfig)
Paired = TypeVar("Paired", bound=DPOConfig | RMConfig)
REFERENCE = "--ref.model_name_or_path"


class ReferencedTask(LanguageTask[Referenced, Row, Answers]):
    """A task that compares a language model with a frozen reference.

    Rows 2i and 2i + 1 of a micro-batch belong together.
    """

    rows_per_unit: ClassVar = 2

    def frozen_paths(self) -> dict[str, str | None]:
        """Return the reference's path, if the loss uses a reference.

        A reference that is identical to the trained model without its adapters is not loaded.
        """
        if not self.config.needs_reference or self.config.reference_is_policy:
            return {}
        return {REFERENCE: self.config.ref.model_name_or_path}

    @property
    def offloads(self) -> bool:
        """The value of --ref.offload."""
        return self.config.ref.offload

    def before(self, model: Any, micro: Answers) -> tuple[Answers, Mapping[str, float]]:
        """Add Σ log π_ref of the answers, unless the sums are already known or not needed."""
        if micro.reference is not None or not self.config.needs_reference:
            return micro, {}
        if REFERENCE in self.frozen:
            scores = self.frozen[REFERENCE](micro.tokens, micro.offsets, micro.loss_mask)
        else:
            with adapters_off(model.module):
                scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        return replace(micro, reference=micro.answer_sums(scores.logprobs)), {}


class PairTask(OfflineTask[Paired, PairRow, Micro]):
    """A task whose rows are pairs.

    Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected text of pair i.
    """

    sample_names: ClassVar = ("chosen", "rejected")
    rows_per_unit: ClassVar = 2

    def has_format(self) -> bool:
        """Return whether the prompts are separate from the answers, or the texts are messages."""
        data = self.config.data
        return bool(data.prompt_key or data.apply_chat_template)

    def prompt_column(self, dataset: Table) -> str | None:
        """Return the column named by --data.prompt_key, or None if texts include their prompts."""
        return self.config.data.prompt_key

    def counts(self, micro: Micro) -> dict[str, float]:
        """Return the number of pairs, which is the denominator."""
        return {"pairs": micro.num_rows / 2}

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the loss and the accuracy."""
        return {"eval/eval_loss": metrics["train/loss"], "eval/acc_mean": metrics["train/acc"]}


def pair_metrics(losses: Tensor, rewards: Tensor) -> dict[str, Metric]:
    """Return the loss, the accuracy and the mean rewards of pairs. A tie counts as half correct.

    Rewards 2i and 2i + 1 belong to the chosen and the rejected text of pair i.
    """
    pairs = len(losses)
    chosen = rewards[0::2]
    rejected = rewards[1::2]
    right = (chosen > rejected).float() + (chosen == rejected).float() / 2
    accuracy = mean_of(right, pairs)
    return {
        "train/loss": mean_of(losses, pairs),
        "train/acc": accuracy,
        "train/acc_mean": accuracy,  # the same value under the name used by older dashboards
        "train/chosen_reward": mean_of(chosen, pairs),
        "train/reject_reward": mean_of(rejected, pairs),
    }


@offline_task("dpo")
class PreferenceTask(PairTask[DPOConfig, Answers], ReferencedTask[DPOConfig, PairRow]):
    """The loss selected by --model.loss_type, averaged over the window's pairs on all ranks."""

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
        """Return pairs of a chosen and a rejected answer to the same prompt."""
        return PreferenceDataset(dataset, tokenizer, self.config.data, needs_prompt=True)

    @property
    def precomputes(self) -> bool:
        """True if --ref.precompute is set and the loss uses a reference."""
        return self.config.needs_reference and self.config.ref.precompute

    def collate(self, rows: Sequence[PairRow]) -> Answers:
        """Return dataset rows as one ragged batch with two samples per row.

        Samples 2i and 2i + 1 are the chosen and the rejected text of pair i.
        """
        tokens: list[list[int]] = []
        masks: list[list[bool]] = []
        sums: list[float] = []
        for row in rows:
            tokens += [row.chosen, row.rejected]
            masks += row.masks
            sums += row.reference
        reference: Tensor | None = None
        if sums:
            reference = torch.tensor(sums)
        return Answers.from_lists(tokens, masks, reference=reference)

    def loss(
        self, model: Any, micro: Answers, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's contribution to the window's mean loss, and its metrics."""
        flags = self.config.model
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        policy = micro.answer_sums(scores.logprobs)
        reference = micro.reference
        if reference is None:
            reference = torch.zeros_like(policy)
        tokens = micro.answer_sums(micro.loss_mask.float())
        judged = Judged(
            policy=policy.view(-1, 2), reference=reference.view(-1, 2), tokens=tokens.view(-1, 2)
        )
        strength = Strength(
            beta=flags.beta, smoothing=flags.label_smoothing, target=flags.target_margin
        )
        losses = PREFERENCE_LOSSES[flags.loss_type](judged, strength)
        pairs = len(losses)
        nll = -judged.means[:, 0]
        summed = (losses + flags.nll_loss_coef * nll).sum()
        if self.config.needs_reference:
            compared = policy - reference
        else:
            compared = judged.means.flatten()
        compared = compared.detach()
        metrics = pair_metrics(losses, flags.beta * compared)
        metrics["train/nll_loss"] = mean_of(nll, pairs)
        if self.config.needs_reference:
            metrics["train/chosen_logratio"] = mean_of(compared[0::2], pairs)
        return self.share(summed, scores.aux_loss, pairs, totals["pairs"], metrics)
