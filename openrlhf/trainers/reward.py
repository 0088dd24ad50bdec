"""Reward models: the chosen answer of a pair is to score above the rejected one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.algorithms.supervised_losses import PAIRWISE_LOSSES
from openrlhf.config.supervised import RMConfig
from openrlhf.data.feedback import PairRow, PreferenceDataset
from openrlhf.data.loading import Table
from openrlhf.experience import Pairs, offsets_of
from openrlhf.models.scalar import ScalarModel, last_token_scores, load_scalar
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.supervised import Rows, load_rows, load_spec, load_tokenizer, run_supervised
from openrlhf.workers.base import MicroBatchLimits, balancing_term

MEASURED = 0.01  # of the training rows: mean and deviation are those of their rewards where there is no evaluation set


class RewardTask:
    """ℓ = −log σ(r_chosen − r_rejected − margin) per pair; the window divides by the number of pairs over all ranks."""

    def __init__(self, loss_type: str, *, use_margin: bool, aux_loss_coef: float = 0.0) -> None:
        self.pairwise = PAIRWISE_LOSSES[loss_type]
        self.use_margin, self.aux_loss_coef = use_margin, aux_loss_coef

    def collate(self, rows: Sequence[PairRow]) -> Pairs:
        """Rows of the dataset as one ragged batch."""
        sequences = [tokens for row in rows for tokens in (row.chosen, row.rejected)]
        return Pairs(
            tokens=torch.tensor([t for tokens in sequences for t in tokens], dtype=torch.long),
            offsets=offsets_of([len(tokens) for tokens in sequences]),
            margins=torch.tensor([row.margin for row in rows]).repeat_interleave(2),
        )

    def micro_batches(self, batch: Pairs, limits: MicroBatchLimits) -> list[Pairs]:
        """Pairs stay together; a limit of rows counts pairs."""
        cut = limits.cut(batch.lengths.view(-1, 2).sum(1))
        return batch.split([[2 * pair + side for pair in part for side in (0, 1)] for part in cut])

    def counts(self, micro: Pairs) -> dict[str, float]:
        """Pairs."""
        return {"pairs": micro.num_samples / 2}

    def loss(self, model: Any, micro: Pairs, totals: Mapping[str, float]) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's share of the mean over the window's pairs."""
        outputs = model(micro.tokens, micro.offsets)
        scores = last_token_scores(outputs.values, micro.offsets)
        chosen, rejected = scores[0::2], scores[1::2]
        losses = self.pairwise(chosen, rejected, micro.margins[0::2] if self.use_margin else None)
        summed, pairs, seen = losses.sum(), len(losses), scores.detach()
        loss, accuracy = Mean(float(summed.detach()), pairs), Mean(float((chosen > rejected).sum()), pairs)
        metrics: dict[str, Metric] = {
            "train/loss": loss,
            "train/acc": accuracy,
            "train/loss_mean": loss,  # the same, under the names of old dashboards
            "train/acc_mean": accuracy,
            "train/chosen_reward": Mean(float(chosen.detach().sum()), pairs),
            "train/reject_reward": Mean(float(rejected.detach().sum()), pairs),
            "reward_square": Mean(float(seen.double().square().sum()), 2 * pairs),
        }
        balance, balance_metrics = balancing_term(outputs.aux_loss, self.aux_loss_coef, pairs)
        return (summed + balance) / totals["pairs"], metrics | balance_metrics

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Loss, accuracy, and mean and unbiased standard deviation of all rewards, chosen and rejected."""
        square = metrics["reward_square"]
        assert isinstance(square, Mean)
        mean = (metrics["train/chosen_reward"].value + metrics["train/reject_reward"].value) / 2
        variance = max(square.value - mean**2, 0.0) * square.count / max(square.count - 1, 1)
        return {
            "eval/eval_loss": metrics["train/loss"],
            "eval/acc_mean": metrics["train/acc"],
            "eval/reward_mean": Mean(mean, 1),
            "eval/reward_std": Mean(max(math.sqrt(variance), 1e-8), 1),
        }

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Keep mean and deviation with the model: --reward.normalize_enable of RL reads them from its configuration."""
        assert isinstance(model, ScalarModel)
        model.set_scale(numbers["eval/reward_mean"], numbers["eval/reward_std"])


def run_rm(config: RMConfig) -> None:
    """Train as the flags say. Runs in every process of the launcher, or in the only one."""
    data, tokenizer = config.data, load_tokenizer(config, padding_side="left")

    def encoded(dataset: Table) -> PreferenceDataset:
        return PreferenceDataset(
            dataset,
            tokenizer,
            max_len=data.max_len,
            prompt_key=data.prompt_key,
            chosen_key=data.chosen_key,
            rejected_key=data.rejected_key,
            input_template=data.input_template,
            apply_chat_template=data.apply_chat_template,
        )

    train_rows, given = load_rows(config, encoded)
    first = FirstRows(train_rows, max(1, int(len(train_rows) * MEASURED)))
    eval_rows: Rows = first if given is None else given
    run_supervised(
        config,
        RewardTask(
            config.model.loss_type, use_margin=config.model.margin_loss_enable, aux_loss_coef=config.model.aux_loss_coef
        ),
        partial(
            load_scalar,
            load_spec(config),
            head_prefix=config.ds.value_head_prefix,
            reinit_head=config.model.reinit_head,
            balancing=config.model.aux_loss_coef > 0,
            seed=config.train.seed,
        ),
        tokenizer=tokenizer,
        train_rows=train_rows,
        eval_rows=eval_rows,
    )


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a dataset: what mean and deviation of the rewards are measured on where no evaluation set is given."""

    rows: Rows
    number: int

    @property
    def summary(self) -> str:
        return f"the first {self.number} of: {self.rows.summary}"

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> PairRow:
        return self.rows[index]
