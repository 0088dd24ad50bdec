"""Two tasks that need more than a model and a loss.

The first task learns from a frozen model. The second task needs a mean over the whole window.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.core.batches import TokenRows, per_token
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import Mean
from openrlhf.trainers.sft import SFTTask
from openrlhf.trainers.tasks import load_spec, offline_task


@dataclass(frozen=True, kw_only=True)
class Judged(TokenRows):
    teacher_logprobs: Tensor | None = per_token(default=None)  # noqa: RUF009


@offline_task("stay_close")
class StayClose(SFTTask):
    """ℓ_t = ½ (log π_θ − log π_0)², where π_0 is the model before training.

    The log-probabilities of π_0 are computed in a first pass over the data.
    """

    def frozen_models(self):
        packing = self.config.ds.packing_samples
        return {
            "start": lambda: PolicyModel(load_causal_lm(load_spec(self.config)), packing=packing)
        }

    def collate(self, rows):
        plain = super().collate(rows)
        return Judged(tokens=plain.tokens, offsets=plain.offsets, loss_mask=plain.loss_mask)

    def before(self, model, micro):
        scores = self.frozen["start"](micro.tokens, micro.offsets, micro.loss_mask)
        return replace(micro, teacher_logprobs=scores.logprobs), {}

    def loss(self, model, micro, totals):
        logprobs = model(micro.tokens, micro.offsets, micro.loss_mask).logprobs
        apart = (logprobs - micro.teacher_logprobs).masked_fill(~micro.loss_mask, 0)
        summed = 0.5 * apart.square().sum() - 0.1 * logprobs.masked_fill(~micro.loss_mask, 0).sum()
        seen = float(micro.loss_mask.sum())
        metrics = {
            "train/gpt_loss": Mean(float(summed.detach()), seen),
            "train/apart": Mean(float(apart.abs().sum()), seen),
        }
        return summed / totals["tokens"], metrics


@offline_task("above_average")
class AboveAverage(SFTTask):
    """ℓ_t = −w_t log π, w_t = σ(log π_t − m).

    m is the mean log-probability of all targets of the window, computed without gradient.
    """

    def before(self, model, micro):
        logprobs = model(micro.tokens, micro.offsets, micro.loss_mask).logprobs
        return micro, {"logprobs": float(logprobs[micro.loss_mask].double().sum())}

    def loss(self, model, micro, totals):
        logprobs = model(micro.tokens, micro.offsets, micro.loss_mask).logprobs[micro.loss_mask]
        weights = torch.sigmoid(logprobs.detach() - totals["logprobs"] / totals["tokens"])
        summed = -(weights * logprobs).sum()
        return summed / totals["tokens"], {
            "train/gpt_loss": Mean(float(summed.detach()), len(logprobs))
        }
