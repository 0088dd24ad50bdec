"""KTO: answers that are desirable, or not, without pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.preference_losses import kto
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
from openrlhf.data.findings import Finding
from openrlhf.data.first_look import TextFormat
from openrlhf.data.layouts import JUDGED
from openrlhf.data.loading import Table
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.preference import ReferencedTask
from openrlhf.trainers.tasks import Rows, offline_task
from openrlhf.training.strategy import Strategy


@offline_task("kto")
class KTOTask(ReferencedTask[KTOConfig, LabelledRow]):
    """The loss of each answer, mean over the window's answers of all ranks.

    The KL is the mean of log π − log π_ref over prompts with the answer of the next row of the
    optimizer step, without gradient: from a first pass over the window, so that it does not depend
    on how the window is split.
    """

    root: ClassVar = KTOConfig
    has_prompts = True
    sample_names: ClassVar = ("answer", "")  # the other is that of the KL
    objective: ClassVar = (
        "kto.beta",
        "kto.desirable_weight",
        "kto.undesirable_weight",
        "model.aux_loss_coef",
    )

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Return labelled answers; both answers of pairs, if there are pairs and no labels.

        Raises DataError for a single row, whose KL would be its own log-ratio.
        """
        rows = self._labelled(dataset, tokenizer)
        if len(rows) == 1:
            raise DataError(
                f"{source_of(dataset)} has 1 usable row. KTO needs at least 2, because its KL pairs each prompt with another row's answer. "
                f"{rows.summary}"
            )
        return rows

    def look_at_rows(self, train_rows: Rows) -> list[Finding]:
        """Warn about labels of one kind only."""
        if not isinstance(train_rows, LabelledDataset):
            return []
        return [check_both_labels(train_rows, column=self.config.data.label_key)]

    def _labelled(
        self, dataset: Table, tokenizer: PreTrainedTokenizerBase
    ) -> BothAnswers | LabelledDataset:
        data = self.config.data
        if self._has_pairs(dataset):
            self.has_prompts = bool(data.prompt_key or data.apply_chat_template)
            return BothAnswers(PreferenceDataset(dataset, tokenizer, data, needs_prompt=True))
        return LabelledDataset(dataset, tokenizer, data)

    def _has_pairs(self, dataset: Table) -> bool:
        data, there = self.config.data, dataset.column_names
        return data.label_key not in there and (data.chosen_key in there or data.layout in JUDGED)

    def prompt_column(self, dataset: Table) -> str | None:
        """The column of --data.prompt_key in pairs, and of --data.input_key elsewhere."""
        return (
            self.config.data.prompt_key
            if self._has_pairs(dataset)
            else super().prompt_column(dataset)
        )

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """Unknown if the prompt is inside the texts of pairs."""
        return super().text_format(tokenizer, ending) if self.has_prompts else None

    def of_window(self, rows: Sequence[LabelledRow], strategy: Strategy) -> list[LabelledRow]:
        """The rows, each with the answer of the next row of the window; the last row with that of
        the first.
        """
        ranks = strategy.dp_size
        every = strategy.gather([(row.answer, row.loss_mask[row.prompt_length :]) for row in rows])
        answers: list[tuple[list[int], list[bool]]] = []  # in the order of rows
        for turn in range(max(map(len, every))):
            answers += [of_rank[turn] for of_rank in every if turn < len(of_rank)]
        paired: list[LabelledRow] = []
        for turn, row in enumerate(rows):
            other, mask = answers[(turn * ranks + strategy.dp_rank + 1) % len(answers)]
            paired.append(replace(row, other=other, other_mask=mask))
        return paired

    def collate(self, rows: Sequence[LabelledRow]) -> Answers:
        """One ragged batch: 2i is row i, 2i + 1 its prompt with the other answer."""
        tokens, masks, desirable = list[list[int]](), list[list[bool]](), list[bool]()
        for row in rows:
            tokens += [row.tokens, self._mismatched(row)]
            masks += [row.loss_mask, self._mismatched_mask(row)]
            desirable += [row.desirable] * 2
        return Answers.from_lists(tokens, masks, desirable=torch.tensor(desirable))

    def _mismatched(self, row: LabelledRow) -> list[int]:
        """The prompt with the other answer, cut as the rows are: the last token is end-of-text."""
        if row.other is None:
            return row.tokens
        mixed = [*row.tokens[: row.prompt_length], *row.other]
        longest = self.config.data.max_len
        if len(mixed) > longest:
            mixed = [*mixed[: longest - 1], row.other[-1]]
        return mixed

    def _mismatched_mask(self, row: LabelledRow) -> list[bool]:
        if row.other is None:
            return row.loss_mask
        return [*row.loss_mask[: row.prompt_length], *row.other_mask][: self.config.data.max_len]

    def before(self, model: Any, micro: Answers) -> tuple[Answers, Mapping[str, float]]:
        """The rows with Σ log π_ref, and their part of the KL; the mismatched rows have served."""
        micro, _ = super().before(model, micro)
        matched, mismatched = (micro.select(range(side, micro.num_samples, 2)) for side in (0, 1))
        scores = model(mismatched.tokens, mismatched.offsets, mismatched.loss_mask)
        assert mismatched.reference is not None
        return matched, {
            "kl": float((mismatched.answer_sums(scores.logprobs) - mismatched.reference).sum())
        }

    def counts(self, micro: Answers) -> dict[str, float]:
        """The number of answers, which is the denominator."""
        return {"answers": float(micro.num_samples)}

    def loss(
        self, model: Any, micro: Answers, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's part of the mean over the window's answers, and its metrics."""
        flags = self.config.kto
        assert micro.reference is not None and micro.desirable is not None
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        ratio = micro.answer_sums(scores.logprobs) - micro.reference
        desirable, answers = micro.desirable, micro.num_samples
        kl = totals["kl"] / totals["answers"]
        wanted, unwanted = flags.desirable_weight, flags.undesirable_weight
        losses = kto(
            ratio,
            desirable,
            kl,
            beta=flags.beta,
            desirable_weight=wanted,
            undesirable_weight=unwanted,
        )
        rewards, good = flags.beta * ratio.detach(), float(desirable.sum())
        metrics: dict[str, Metric] = {
            "train/kto_loss": Mean(float(losses.detach().sum()), answers),
            "train/chosen_reward": Mean(float(rewards[desirable].sum()), good),
            "train/chosen_logratio": Mean(float(ratio.detach()[desirable].sum()), good),
            "train/reject_reward": Mean(float(rewards[~desirable].sum()), answers - good),
            "train/kto_kl": Mean(max(kl, 0.0) * answers, answers),
        }
        return self.share(losses.sum(), scores.aux_loss, answers, totals["answers"], metrics)

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Loss and mean rewards of both kinds of answers."""
        names = ("chosen_reward", "reject_reward")
        return {"eval/eval_loss": metrics["train/kto_loss"]} | {
            f"eval/{n}": metrics[f"train/{n}"] for n in names
        }
