"""Models that are only run forwards: the reference policy and reward models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from openrlhf.distributed.strategy import Strategy
from openrlhf.experience import Experience
from openrlhf.models.loading import LoadSpec, load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scalar import last_token_scores, load_scalar
from openrlhf.workers.base import MicroBatchLimits, per_sample_column, per_token_column


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """What a reference worker needs to know."""

    load: LoadSpec
    forward: MicroBatchLimits
    temperature: float


class ReferenceWorker:
    """π_ref: the policy before training."""

    def __init__(self, strategy: Strategy, settings: ReferenceSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        self.model = strategy.frozen(lambda: PolicyModel(load_causal_lm(settings.load), packing=settings.load.packing))

    def logprobs(self, experience: Experience) -> Tensor:
        """log π_ref of every sampled token of this rank's rows, (N,)."""
        return per_token_column(experience, self._score, self.settings.forward, self.strategy)

    def _score(self, micro: Experience) -> Tensor:
        return self.model(micro.tokens, micro.offsets, micro.action_mask, self.settings.temperature).logprobs


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """What a reward worker needs to know."""

    load: LoadSpec
    forward: MicroBatchLimits
    head_prefix: str
    normalize: bool


class RewardWorker:
    """A trained reward model: one number per finished episode, read at its last token."""

    def __init__(self, strategy: Strategy, settings: RewardModelSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        self.model = strategy.frozen(
            lambda: load_scalar(
                settings.load, head_prefix=settings.head_prefix, require_head=True, normalize=settings.normalize
            )
        )

    def rewards(self, experience: Experience) -> Tensor:
        """Rewards of this rank's rows, (B,)."""
        return per_sample_column(experience, self._score, self.settings.forward, self.strategy)

    def _score(self, micro: Experience) -> Tensor:
        return last_token_scores(self.model(micro.tokens, micro.offsets), micro.offsets)
