"""Models that only run forward: the reference policy, the teacher and reward models."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openrlhf.batches import Ragged, TokenRows
from openrlhf.distributed.strategy import Strategy
from openrlhf.models.loading import LoadSpec, load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.proof import prove_layout
from openrlhf.models.scalar import ScalarModel, last_token_scores, load_scalar
from openrlhf.workers.base import MicroBatchLimits, column_of


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """The settings of a reference or teacher worker."""

    load: LoadSpec
    forward_limits: MicroBatchLimits
    temperature: float


class ReferenceWorker:
    """A frozen policy: π_ref, or the teacher."""

    def __init__(self, strategy: Strategy, settings: ReferenceSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        load = settings.load
        self.model = strategy.frozen(lambda: PolicyModel(load_causal_lm(load), packing=load.packing))
        prove_layout(self.model)

    def logprobs(self, rows: TokenRows) -> Tensor:
        """Log-probability of every target of this rank's rows, (N,)."""
        return column_of(rows, self._score, self.settings.forward_limits, self.strategy)

    def _score(self, micro: TokenRows) -> Tensor:
        return self.model(micro.tokens, micro.offsets, micro.loss_mask, self.settings.temperature).logprobs


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """The settings of a reward worker."""

    models: tuple[LoadSpec, ...]
    forward_limits: MicroBatchLimits
    head_prefix: str
    normalize: bool


class RewardWorker:
    """Trained reward models. Each gives a finished episode one number, the output at the last token."""

    def __init__(self, strategy: Strategy, settings: RewardModelSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        self.models = [strategy.frozen(partial(self._load, spec)) for spec in settings.models]
        for model in self.models:
            prove_layout(model)

    def _load(self, spec: LoadSpec) -> ScalarModel:
        settings = self.settings
        return load_scalar(spec, head_prefix=settings.head_prefix, require_head=True, normalize=settings.normalize)

    def rewards(self, texts: Ragged) -> Tensor:
        """Rewards of this rank's rows by every model, (B, K)."""
        scorers = [partial(self._score, model) for model in self.models]
        columns = [column_of(texts, s, self.settings.forward_limits, self.strategy, per_sample=True) for s in scorers]
        return torch.stack(columns, dim=1)

    def _score(self, model: Any, micro: Ragged) -> Tensor:
        return last_token_scores(model(micro.tokens, micro.offsets).values, micro.offsets)
