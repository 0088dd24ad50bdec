"""Supervised fine-tuning: −log π of the response tokens, one mean over all tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from openrlhf.algorithms.supervised_losses import token_nll
from openrlhf.config.supervised import SFTConfig
from openrlhf.data.loading import Table
from openrlhf.data.sft import SFTDataset, SFTRow
from openrlhf.experience import TokenRows
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.supervised import load_rows, load_spec, load_tokenizer, run_supervised
from openrlhf.workers.base import MicroBatchLimits, balancing_term


class SFTTask:
    """ℓ_t = −log π(token_t) for target tokens; the window divides by their number over all ranks."""

    def __init__(self, *, aux_loss_coef: float = 0.0) -> None:
        self.aux_loss_coef = aux_loss_coef

    def collate(self, rows: Sequence[SFTRow]) -> TokenRows:
        """Rows of the dataset as one ragged batch."""
        return TokenRows.from_lists([row.tokens for row in rows], [row.loss_mask for row in rows])

    def micro_batches(self, batch: TokenRows, limits: MicroBatchLimits) -> list[TokenRows]:
        """Any row may go with any other."""
        return batch.split(limits.cut(batch.lengths))

    def counts(self, micro: TokenRows) -> dict[str, float]:
        """Target tokens."""
        return {"tokens": float(micro.loss_mask.sum())}

    def loss(self, model: Any, micro: TokenRows, totals: Mapping[str, float]) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's share of the mean over the window's target tokens."""
        scores = model(micro.tokens, micro.offsets, micro.loss_mask)
        summed = (token_nll(scores.logprobs, micro.loss_mask)).sum()
        seen = float(micro.loss_mask.sum())
        mean = Mean(float(summed.detach()), seen)
        metrics: dict[str, Metric] = {"train/gpt_loss": mean, "train/loss_mean": mean}  # of old dashboards
        balance, balance_metrics = balancing_term(scores.aux_loss, self.aux_loss_coef, seen)
        return (summed + balance) / totals["tokens"], metrics | balance_metrics

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The reference's name has a space in it; dashboards know it."""
        return {"eval/eval gpt_loss": metrics["train/gpt_loss"]} if metrics else {}

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Nothing to keep."""


def run_sft(config: SFTConfig) -> None:
    """Train as the flags say. Runs in every process of the launcher, or in the only one."""
    data, tokenizer = config.data, load_tokenizer(config, padding_side="right")

    def encoded(dataset: Table) -> SFTDataset:
        return SFTDataset(
            dataset,
            tokenizer,
            max_len=data.max_len,
            input_key=data.input_key,
            output_key=data.output_key,
            input_template=data.input_template,
            apply_chat_template=data.apply_chat_template,
            multiturn=data.multiturn,
            pretrain_mode=config.model.pretrain_mode_enable,
        )

    train_rows, eval_rows = load_rows(config, encoded)
    run_supervised(
        config,
        SFTTask(aux_loss_coef=config.model.aux_loss_coef),
        lambda: PolicyModel(
            load_causal_lm(load_spec(config)),
            packing=config.ds.packing_samples,
            balancing=config.model.aux_loss_coef > 0,
        ),
        tokenizer=tokenizer,
        train_rows=train_rows,
        eval_rows=eval_rows,
    )
