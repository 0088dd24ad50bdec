"""A text classifier as a task written from scratch.

The probability of label 1 is σ(score of the last token).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.core.batches import Ragged, offsets_of, per_row
from openrlhf.models.scalar import last_token_scores, load_scalar
from openrlhf.observability.metrics import Mean
from openrlhf.trainers.tasks import OfflineTask, offline_task, trained_spec


@dataclass(frozen=True, kw_only=True)
class Labelled(Ragged):
    labels: Tensor = per_row()  # noqa: RUF009


class Texts:
    def __init__(self, dataset, tokenizer, data):
        self.rows = [
            (tokenizer(row[data.input_key]).input_ids, float(row[data.output_key]))
            for row in dataset
        ]
        self.summary = f"{len(self.rows)} texts."

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@offline_task("classifier")
class Classifier(OfflineTask):
    def rows(self, dataset, tokenizer):
        return Texts(dataset, tokenizer, self.config.data)

    def load_model(self):
        return load_scalar(trained_spec(self.config))

    def collate(self, rows):
        texts, labels = zip(*rows, strict=True)
        tokens = torch.tensor([token for text in texts for token in text])
        return Labelled(
            tokens=tokens,
            offsets=offsets_of([len(text) for text in texts]),
            labels=torch.tensor(labels),
        )

    def counts(self, micro):
        return {"texts": float(micro.num_rows)}

    def loss(self, model, micro, totals):
        scores = last_token_scores(model(micro.tokens, micro.offsets).values, micro.offsets)
        summed = F.binary_cross_entropy_with_logits(scores, micro.labels, reduction="sum")
        right = float(((scores > 0) == (micro.labels > 0)).sum())
        metrics = {
            "train/loss": Mean(float(summed.detach()), micro.num_rows),
            "train/acc": Mean(right, micro.num_rows),
        }
        return summed / totals["texts"], metrics

    def evaluation_names(self, metrics):
        return {"eval/eval_loss": metrics["train/loss"], "eval/acc": metrics["train/acc"]}
