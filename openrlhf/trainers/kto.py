"""KTO: training on answers labeled desirable or undesirable, without pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.preference_losses import kto
from openrlhf.checks import Finding
from openrlhf.config.supervised import KTOConfig
from openrlhf.core.batches import Answers
from openrlhf.data.errors import DataError, source_of
from openrlhf.data.feedback import (
    BothAnswers,
    LabelledDataset,
    LabelledRow,
    PreferenceDataset,
    check_both_labels,
)
from openrlhf.data.layouts import JUDGED
from openrlhf.data.loading import Table
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.preference import ReferencedTask
from openrlhf.trainers.tasks import Rows, offline_task
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import mean_of


@offline_task("kto")
class KTOTask(ReferencedTask[KTOConfig, LabelledRow]):
    """The KTO loss, averaged over the answers of the accumulation window on all ranks.

    The KL is the mean of log π − log π_ref over prompts that are paired with the next row's answer,
    computed without gradient. The KL is computed in a first pass over the window, so that it does
    not depend on how the window is split.
    """

    root: ClassVar = KTOConfig
    has_prompts = True
    sample_names: ClassVar = ("answer", "")  # the second sample is for the KL
    objective: ClassVar = (
        "kto.beta",
        "kto.desirable_weight",
        "kto.undesirable_weight",
        "model.aux_loss_coef",
    )

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Return labeled answers, or both answers of each pair if the dataset has no labels.

        Raises DataError if there is only one row, because the KL would equal the row's own
        log-ratio.
        """
        rows: BothAnswers | LabelledDataset
        data = self.config.data
        if self._has_pairs(dataset):
            self.has_prompts = bool(data.prompt_key or data.apply_chat_template)
            rows = BothAnswers(PreferenceDataset(dataset, tokenizer, data, needs_prompt=True))
        else:
            rows = LabelledDataset(dataset, tokenizer, data)
        if len(rows) == 1:
            raise DataError(
                f"{source_of(dataset)} has 1 usable row. KTO needs at least 2, because its KL term "
                f"pairs each prompt with another row's answer. {rows.summary}"
            )
        return rows

    def look_at_rows(self, train_rows: Rows) -> list[Finding]:
        """Return a notice if all labels are the same."""
        if not isinstance(train_rows, LabelledDataset):
            return []
        return check_both_labels(train_rows, column=self.config.data.label_key)

    def _has_pairs(self, dataset: Table) -> bool:
        data = self.config.data
        columns = dataset.column_names
        if data.label_key in columns:
            return False
        return data.chosen_key in columns or data.layout in JUDGED

    def prompt_column(self, dataset: Table) -> str | None:
        """Return the column named by --data.prompt_key for pairs, else by --data.input_key."""
        if self._has_pairs(dataset):
            return self.config.data.prompt_key
        return super().prompt_column(dataset)

    def has_format(self) -> bool:
        """Return False if the texts of pairs include their prompts."""
        return self.has_prompts

    def of_window(self, rows: Sequence[LabelledRow], strategy: Strategy) -> list[LabelledRow]:
        """Return this rank's rows, each paired with the next row's answer. Collective.

        The window's last row is paired with the first row's answer. The window's rows are assigned
        to the ranks round-robin: row i of rank r is row i · ranks + r of the window.
        """
        own = [(row.answer, row.loss_mask[row.prompt_length :]) for row in rows]
        answers: list[tuple[list[int], list[bool]]] = []  # tokens and targets, in window order
        for turn in zip_longest(*strategy.gather(own)):
            answers += filter(None, turn)  # the last ranks may have one row fewer
        paired: list[LabelledRow] = []
        for number, row in enumerate(rows):
            place = number * strategy.dp_size + strategy.dp_rank
            other, other_mask = answers[(place + 1) % len(answers)]
            paired.append(replace(row, other=other, other_mask=other_mask))
        return paired

    def collate(self, rows: Sequence[LabelledRow]) -> Answers:
        """Return one ragged batch. Sample 2i is row i; 2i + 1 is its prompt with another answer."""
        tokens: list[list[int]] = []
        masks: list[list[bool]] = []
        desirable: list[bool] = []
        for row in rows:
            mismatched, targets = self._mismatched(row)
            tokens += [row.tokens, mismatched]
            masks += [row.loss_mask, targets]
            desirable += [row.desirable, row.desirable]
        return Answers.from_lists(tokens, masks, desirable=torch.tensor(desirable))

    def _mismatched(self, row: LabelledRow) -> tuple[list[int], list[bool]]:
        """Return tokens and targets of the prompt followed by the other row's answer.

        The result is truncated like any other row, and still ends with the end-of-text token. A row
        that is not paired with another answer is returned unchanged.
        """
        if row.other is None:
            return row.tokens, row.loss_mask
        length = row.prompt_length
        longest = self.config.data.max_len
        tokens = [*row.tokens[:length], *row.other]
        targets = [*row.loss_mask[:length], *row.other_mask]
        if len(tokens) > longest:
            tokens = [*tokens[: longest - 1], row.other[-1]]
        return tokens, targets[:longest]

    def before(self, model: Any, micro: Answers) -> tuple[Answers, Mapping[str, float]]:
        """Return the rows with Σ log π_ref and their contribution to the KL estimate.

        The mismatched samples are dropped, because they are needed only for the KL estimate.
        """
        micro, _ = super().before(model, micro)
        matched = micro.select(range(0, micro.num_rows, 2))
        mismatched = micro.select(range(1, micro.num_rows, 2))
        scores = model(mismatched.tokens, mismatched.offsets, mismatched.loss_mask)
        assert mismatched.reference is not None
        log_ratios = mismatched.answer_sums(scores.logprobs) - mismatched.reference
        return matched, {"kl": float(log_ratios.sum())}

    def counts(self, micro: Answers) -> dict[str, float]:
        """Return the number of answers, which is the denominator."""
        return {"answers": float(micro.num_rows)}

    def loss(
        self, model: Any, micro: Answers, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's contribution to the window's mean loss, and its metrics."""
        flags = self.config.kto
        desirable = micro.desirable
        assert micro.reference is not None and desirable is not None
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        log_ratios = micro.answer_sums(scores.logprobs) - micro.reference
        kl = totals["kl"] / totals["answers"]
        losses = kto(
            log_ratios,
            desirable,
            kl,
            beta=flags.beta,
            desirable_weight=flags.desirable_weight,
            undesirable_weight=flags.undesirable_weight,
        )
        log_ratios = log_ratios.detach()
        rewards = flags.beta * log_ratios
        answers = micro.num_rows
        good = float(desirable.sum())
        metrics: dict[str, Metric] = {
            "train/kto_loss": mean_of(losses, answers),
            "train/chosen_reward": mean_of(rewards[desirable], good),
            "train/chosen_logratio": mean_of(log_ratios[desirable], good),
            "train/reject_reward": mean_of(rewards[~desirable], answers - good),
            "train/kto_kl": Mean(max(kl, 0.0) * answers, answers),
        }
        return self.share(losses.sum(), scores.aux_loss, answers, totals["answers"], metrics)

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the loss and the mean rewards of desirable and undesirable answers."""
        return {
            "eval/eval_loss": metrics["train/kto_loss"],
            "eval/chosen_reward": metrics["train/chosen_reward"],
            "eval/reject_reward": metrics["train/reject_reward"],
        }
