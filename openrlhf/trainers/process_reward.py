"""Process reward models: a language model says after each step whether the step was right."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import PRMConfig
from openrlhf.core.batches import Steps, offsets_of
from openrlhf.data.errors import DataError
from openrlhf.data.first_look import TextFormat
from openrlhf.data.loading import Table
from openrlhf.data.steps import StepDataset, StepRow
from openrlhf.models.loading import STEP_TOKENS
from openrlhf.models.policy import LogitModel, PolicyModel
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.tasks import LanguageTask, offline_task


@offline_task("prm")
class ProcessRewardTask(LanguageTask[PRMConfig, StepRow, Steps]):
    """ℓ = −Σ_v q(v) log p(v) after each labelled step, mean over the window's labelled steps of all
    ranks.

    p is over the reward tokens, or over the whole vocabulary if none are named; q is the label: one
    token, or for soft labels P(right) and 1 − P(right).     Lightman et al. 2023, arXiv:2305.20050;
    Wang et al. 2023, arXiv:2312.08935
    """

    root: ClassVar = PRMConfig
    model_class: ClassVar = LogitModel
    objective: ClassVar = ("prm.placeholder_token", "prm.reward_tokens", "model.aux_loss_coef")
    reward_tokens: Sequence[int] = ()
    soft: bool | None = None

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> StepDataset:
        """Texts with labelled steps. Raises DataError unless the labels of all datasets are tokens,
        or all are numbers.
        """
        rows = StepDataset(dataset, tokenizer, self.config)
        if self.soft not in (None, rows.soft):
            raise DataError(
                "Of --data.dataset and --eval.dataset, one has numbers as labels, the other has tokens."
            )
        self.reward_tokens, self.soft = rows.reward_tokens, rows.soft
        return rows

    def load_model(self) -> PolicyModel:
        """A language model that stores its tokens, for its use as a reward."""
        model, prm = super().load_model(), self.config.prm
        stored = {
            "placeholder_token": prm.placeholder_token,
            "reward_tokens": list(prm.reward_tokens),
        }
        setattr(model.hf.config, STEP_TOKENS, stored)
        return model

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """Unknown: texts have prompts and steps already."""
        return None

    def collate(self, rows: Sequence[StepRow]) -> Steps:
        """Rows of the dataset as one ragged batch."""
        offsets = offsets_of([len(row.tokens) for row in rows])
        labels = torch.full((int(offsets[-1]),), torch.nan, dtype=torch.float64)
        for row, first in zip(rows, offsets.tolist(), strict=False):
            labels[first + torch.tensor(row.places)] = torch.tensor(row.labels, dtype=torch.float64)
        return Steps(
            tokens=torch.tensor([t for row in rows for t in row.tokens]),
            offsets=offsets,
            labels=labels,
        )

    def counts(self, micro: Steps) -> dict[str, float]:
        """The number of labelled steps, which is the denominator."""
        return {"steps": float((~micro.labels.isnan()).sum())}

    def loss(
        self, model: Any, micro: Steps, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's part of the mean over the window's labelled steps, and its metrics."""
        at = ~micro.labels.isnan()
        labels = micro.labels[at]
        among = torch.tensor(self.reward_tokens, device=labels.device)
        outputs = model(
            micro.tokens,
            micro.offsets,
            at,
            lambda logits, _: logits[:, among] if len(among) else logits,
        )
        logits = outputs.values
        if self.soft:
            wanted = torch.stack([labels, 1 - labels], 1).to(logits.dtype)
            right = wanted.argmax(1)
        else:
            wanted = right = (
                (labels[:, None] == among).long().argmax(1) if len(among) else labels.long()
            )
        summed, seen = cross_entropy(logits, wanted, reduction="sum"), float(len(labels))
        accuracy = Mean(float((logits.argmax(1) == right).sum()), seen)
        metrics: dict[str, Metric] = {
            "train/prm_loss": Mean(float(summed.detach()), seen),
            "train/acc": accuracy,
            "train/acc_mean": accuracy,
        }
        return self.share(summed, outputs.aux_loss, seen, totals["steps"], metrics)

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Loss and accuracy, under the names of the reference."""
        return {
            "eval/eval prm_loss": metrics["train/prm_loss"],
            "eval/eval acc": metrics["train/acc"],
        }
