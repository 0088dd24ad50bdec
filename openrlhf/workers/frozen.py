"""Models that are only run forwards: the reference policy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from openrlhf.distributed.strategy import Strategy
from openrlhf.experience import Experience
from openrlhf.models.loading import LoadSpec, load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.workers.base import MicroBatchLimits, score_tokens


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
        self.model = strategy.frozen(
            lambda: PolicyModel(load_causal_lm(settings.load), packing=settings.load.packing)
        )

    def logprobs(self, experience: Experience) -> Tensor:
        """log π_ref of every sampled token of this rank's rows, (N,)."""
        return score_tokens(
            self.model,
            experience,
            self.settings.forward,
            self.strategy,
            temperature=self.settings.temperature,
        )
