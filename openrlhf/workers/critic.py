"""The critic, which predicts state values and is trained by regression on the returns."""

from collections.abc import Mapping

from torch import Tensor

from openrlhf.algorithms.policy_losses import value_loss
from openrlhf.algorithms.tensors import masked_sum
from openrlhf.core.batches import Experience, Ragged
from openrlhf.models.loading import has_balanced_experts
from openrlhf.models.scalar import ScalarModel, load_scalar, state_values
from openrlhf.training.engine import Metrics
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import (
    RoleSettings,
    TrainedWorker,
    Update,
    balancing_term,
    column_of,
    mean_of,
)


class CriticWorker(TrainedWorker[Update]):
    """The trained critic V."""

    name = "critic"
    update_columns = ("values", "returns")  # batch columns needed by an update

    def __init__(self, strategy: Strategy, settings: RoleSettings) -> None:
        config = settings.config
        critic = config.critic
        # The policy's model has no trained value head.
        is_policy_model = critic.model_name_or_path == config.actor.model_name_or_path

        def load() -> ScalarModel:
            model = load_scalar(
                settings.load,
                head_prefix=config.ds.value_head_prefix,
                reinit_head=is_policy_model,
                normalize=config.reward.normalize_enable,
                seed=config.train.seed,
            )
            # --actor.aux_loss_coef is set for the policy; the critic may have no experts.
            model.balancing = config.actor.aux_loss_coef > 0 and has_balanced_experts(model.hf)
            return model

        super().__init__(strategy, settings, critic, load)

    def values(self, texts: Ragged) -> Tensor:
        """Return V of the state before each token of this rank's rows, (N,)."""
        with self.engine.evaluating():
            return column_of(texts, self._score, self.forward_limits, self.strategy)

    def _score(self, micro: Ragged) -> Tensor:
        return state_values(self.engine.module(micro.tokens, micro.offsets).values, micro.offsets)

    def counts(self, micro: Experience) -> Mapping[str, float]:
        """Return the number of action tokens, which is the loss denominator."""
        return {"tokens": float(micro.action_mask.sum())}

    def loss(
        self, micro: Experience, totals: Mapping[str, float], job: Update
    ) -> tuple[Tensor, Metrics]:
        """Compute ½ (V − Ĝ)² + a·balance, a micro-batch's part of the window's loss.

        The squared error is clipped around the rollout's values. The loss is the mean over the
        window's action tokens.
        """
        assert micro.values is not None and micro.returns is not None
        layout = micro.layout
        outputs = self.engine(micro.tokens, micro.offsets)
        values = layout.pad(state_values(outputs.values, micro.offsets))
        mask = layout.pad(micro.action_mask)
        clip = self.config.critic.value_clip
        per_token = value_loss(
            values, layout.pad(micro.values), layout.pad(micro.returns), mask, clip=clip
        )
        summed = per_token.sum()
        tokens = float(mask.sum())
        balance, balance_metrics = balancing_term(
            outputs.aux_loss, self.config.actor.aux_loss_coef, tokens, "train/critic_aux_loss"
        )
        metrics: Metrics = {
            "train/critic_loss": mean_of(summed, tokens),
            "train/values": mean_of(masked_sum(values, mask), tokens),
        }
        return (summed + balance) / totals["tokens"], metrics | balance_metrics
