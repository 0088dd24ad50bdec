"""Reward models: the chosen answer of a pair should score above the rejected answer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.supervised_losses import log_sigmoid
from openrlhf.config.supervised import RMConfig
from openrlhf.core.batches import Pairs
from openrlhf.data.feedback import PairRow, PreferenceDataset
from openrlhf.data.loading import Table
from openrlhf.models.scalar import ScalarModel, check_scalar_weights, last_token_scores, load_scalar
from openrlhf.observability.metrics import Deviation, Mean, Metric
from openrlhf.trainers.preference import PairTask, pair_metrics
from openrlhf.trainers.tasks import offline_task, trained_spec

# Fraction and minimum number of training rows to evaluate if there is no evaluation set.
MEASURED_FRACTION = 0.01
FEWEST_MEASURED = 100


@offline_task("rm")
class RewardTask(PairTask[RMConfig, Pairs]):
    """ℓ = −log σ(r_chosen − r_rejected − margin) per pair.

    The loss is averaged over the window's pairs on all ranks.
    """

    root: ClassVar = RMConfig
    padding_side: ClassVar = "left"
    stores_numbers: ClassVar = True
    objective: ClassVar = ("model.loss_type", "model.margin_loss_enable", "model.aux_loss_coef")

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> PreferenceDataset:
        """Return pairs of a chosen and a rejected answer."""
        return PreferenceDataset(dataset, tokenizer, self.config.data)

    def measured_rows(self, train_rows: Any) -> Subset[PairRow]:
        """Return the first training rows.

        The model always stores the scale of its rewards for these rows.
        """
        number = max(FEWEST_MEASURED, int(len(train_rows) * MEASURED_FRACTION))
        return Subset(train_rows, range(min(number, len(train_rows))))

    def check_model(self) -> None:
        """Raise ModelError unless the folder has a complete model that a scalar head can use."""
        check_scalar_weights(
            trained_spec(self.config),
            head_prefix=self.config.ds.value_head_prefix,
            reinit_head=self.config.model.reinit_head,
        )

    def load_model(self) -> ScalarModel:
        """Load a language model with a scalar head."""
        return load_scalar(
            trained_spec(self.config),
            head_prefix=self.config.ds.value_head_prefix,
            reinit_head=self.config.model.reinit_head,
            balancing=self.config.model.aux_loss_coef > 0,
            seed=self.config.train.seed,
        )

    def collate(self, rows: Sequence[PairRow]) -> Pairs:
        """Return dataset rows as one ragged batch with two samples per row."""
        texts: list[list[int]] = []
        margins: list[float] = []
        for row in rows:
            texts += [row.chosen, row.rejected]
            margins += [row.margin, row.margin]
        return Pairs.of(texts, margins=torch.tensor(margins))

    def loss(
        self, model: Any, micro: Pairs, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's contribution to the window's mean loss, and its metrics."""
        outputs = model(micro.tokens, micro.offsets)
        scores = last_token_scores(outputs.values, micro.offsets)
        flags = self.config.model
        margin: Tensor | None = None
        if flags.margin_loss_enable and flags.loss_type == "sigmoid":  # logexp has no margin
            margin = micro.margins[0::2]
        losses = log_sigmoid(scores[0::2], scores[1::2], margin)
        rewards = scores.detach()
        metrics = pair_metrics(losses, rewards)
        metrics["rewards"] = Deviation.of(rewards.double().tolist())
        return self.share(losses.sum(), outputs.aux_loss, len(losses), totals["pairs"], metrics)

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the loss, the accuracy, and the scale of chosen and rejected rewards combined.

        The scale consists of the mean and the unbiased standard deviation.
        """
        rewards = metrics["rewards"]
        assert isinstance(rewards, Deviation)
        scale = {
            "eval/reward_mean": Mean(rewards.mean, 1),
            "eval/reward_std": Mean(max(rewards.value, 1e-8), 1),
        }
        return super().evaluation_names(metrics) | scale

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Store the rewards' mean and standard deviation in the model's configuration.

        RL runs use these values with --reward.normalize_enable.
        """
        assert isinstance(model, ScalarModel)
        model.set_scale(numbers["eval/reward_mean"], numbers["eval/reward_std"])
