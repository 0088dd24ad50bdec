"""Process reward models: a language model predicts whether each reasoning step is correct."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import PRMConfig
from openrlhf.core.batches import Steps
from openrlhf.data.errors import DataError
from openrlhf.data.loading import Table
from openrlhf.data.steps import StepDataset, StepRow
from openrlhf.models.loading import STEP_TOKENS
from openrlhf.models.policy import LogitModel, PolicyModel, reduced_logits
from openrlhf.observability.metrics import Metric
from openrlhf.trainers.tasks import LanguageTask, offline_task
from openrlhf.workers.base import mean_of


@offline_task("prm")
class ProcessRewardTask(LanguageTask[PRMConfig, StepRow, Steps]):
    """ℓ = −Σ_v q(v) log p(v) after each labeled step.

    Lightman et al. 2023, arXiv:2305.20050; Wang et al. 2023, arXiv:2312.08935

    The loss is averaged over the window's labeled steps on all ranks. p is the distribution over
    the reward tokens, or over the entire vocabulary if no reward tokens are configured. q is the
    label: one token, or P(correct) and 1 − P(correct) for soft labels.
    """

    root: ClassVar = PRMConfig
    model_class: ClassVar = LogitModel
    objective: ClassVar = ("prm.placeholder_token", "prm.reward_tokens", "model.aux_loss_coef")
    reward_tokens: Sequence[int] = ()
    soft: bool | None = None

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> StepDataset:
        """Return texts with labeled steps.

        Raises DataError if some datasets have token labels and others have numeric labels.
        """
        rows = StepDataset(dataset, tokenizer, self.config)
        if self.soft not in (None, rows.soft):
            raise DataError(
                "Labels are numbers in one of --data.dataset and --eval.dataset, but tokens in the "
                "other. Use the same kind of labels in both datasets."
            )
        self.reward_tokens = rows.reward_tokens
        self.soft = rows.soft
        return rows

    def load_model(self) -> PolicyModel:
        """Load a language model, and store the step tokens in its configuration.

        The exported model can then be used as a reward model.
        """
        model = super().load_model()
        stored = {
            "placeholder_token": self.config.prm.placeholder_token,
            "reward_tokens": list(self.config.prm.reward_tokens),
        }
        setattr(model.hf.config, STEP_TOKENS, stored)
        return model

    def has_format(self) -> bool:
        """Return False, because the texts already include their prompts and steps."""
        return False

    def collate(self, rows: Sequence[StepRow]) -> Steps:
        """Return dataset rows as one ragged batch."""
        labels: list[Tensor] = []
        for row in rows:
            column = torch.full((len(row.tokens),), torch.nan, dtype=torch.float64)
            column[torch.tensor(row.places)] = torch.tensor(row.labels, dtype=torch.float64)
            labels.append(column)
        return Steps.of([row.tokens for row in rows], labels=torch.cat(labels))

    def counts(self, micro: Steps) -> dict[str, float]:
        """Return the number of labeled steps, which is the denominator."""
        return {"steps": float((~micro.labels.isnan()).sum())}

    def loss(
        self, model: Any, micro: Steps, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's contribution to the mean over the window's labeled steps."""
        at = ~micro.labels.isnan()
        labels = micro.labels[at]
        among = torch.tensor(self.reward_tokens, device=labels.device)

        def judged(logits: Tensor, rows: slice | Tensor) -> Tensor:
            """Return the loss at each given step, and whether the most likely label is correct."""
            if len(among):
                logits = logits[:, among]
            targets, likeliest = self._targets(labels[rows], among, logits.dtype)
            losses = cross_entropy(logits, targets, reduction="none")
            return torch.stack([losses, (logits.argmax(1) == likeliest).to(losses.dtype)], 1)

        outputs = reduced_logits(model, micro.tokens, micro.offsets, at, judged)
        summed, right = outputs.values.sum(0)
        seen = float(len(labels))
        accuracy = mean_of(right, seen)
        metrics: dict[str, Metric] = {
            "train/prm_loss": mean_of(summed, seen),
            "train/acc": accuracy,
            "train/acc_mean": accuracy,
        }
        return self.share(summed, outputs.aux_loss, seen, totals["steps"], metrics)

    def _targets(self, labels: Tensor, among: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy targets, and the index of each step's most likely label."""
        if self.soft:
            targets = torch.stack([labels, 1 - labels], 1).to(dtype)
            return targets, targets.argmax(1)
        targets = labels.long()
        if len(among):
            targets = (labels[:, None] == among).long().argmax(1)
        return targets, targets

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the loss and the accuracy, with a space in their names as in OpenRLHF."""
        return {
            "eval/eval prm_loss": metrics["train/prm_loss"],
            "eval/eval acc": metrics["train/acc"],
        }
