"""Models that only run forward: the reference policy, the teacher and reward models."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openrlhf.batches import Ragged, TokenRows
from openrlhf.distributed.strategy import FrozenModel, Strategy
from openrlhf.models.loading import LoadSpec, load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.proof import prove_layout
from openrlhf.models.scalar import ScalarModel, last_token_scores, load_scalar
from openrlhf.workers.base import MicroBatchLimits, column_of
from openrlhf.workers.steps import StepScorer


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """The settings of a reference or teacher worker."""

    load: LoadSpec
    forward_limits: MicroBatchLimits
    temperature: float
    offload: bool = False  # in CPU memory between uses


class ReferenceWorker:
    """A frozen policy: π_ref, or the teacher."""

    def __init__(self, strategy: Strategy, settings: ReferenceSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        load = settings.load
        self.model = FrozenModel(
            strategy,
            lambda: PolicyModel(load_causal_lm(load), packing=load.ds.packing_samples),
            offload=settings.offload,
        )
        prove_layout(self.model.on_device())
        self.model.rest()

    def logprobs(self, rows: TokenRows) -> Tensor:
        """Log-probability of every target of this rank's rows, (N,)."""
        column = column_of(rows, self._score, self.settings.forward_limits, self.strategy)
        self.model.rest()
        return column

    def _score(self, micro: TokenRows) -> Tensor:
        return self.model(micro.tokens, micro.offsets, micro.loss_mask, self.settings.temperature).logprobs


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """The settings of a reward worker."""

    models: tuple[LoadSpec, ...]
    process_model: LoadSpec | None
    step_separator: str
    forward_limits: MicroBatchLimits
    head_prefix: str
    normalize: bool
    offload: bool = False  # in CPU memory between uses


class RewardWorker:
    """Trained reward models. Each gives a finished episode one number, the output at the last token.

    A process reward model gives each step of an episode a number.
    """

    def __init__(self, strategy: Strategy, settings: RewardModelSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        self.models = [
            FrozenModel(strategy, partial(self._load, spec), offload=settings.offload) for spec in settings.models
        ]
        self.steps: StepScorer | None = None
        if settings.process_model:
            separator, offload = settings.step_separator, settings.offload
            self.steps = StepScorer(strategy, settings.process_model, separator=separator, offload=offload)
        for model in [*self.models, *([self.steps.model] if self.steps else [])]:
            prove_layout(model.on_device())
            model.rest()

    def step_rewards(self, answers: TokenRows) -> Tensor:
        """Rewards of the steps of this rank's rows by the process reward model, (N,): see `StepScorer.rewards`."""
        assert self.steps
        column = column_of(answers, self.steps.rewards, self.settings.forward_limits, self.strategy)
        self.steps.model.rest()
        return column

    def _load(self, spec: LoadSpec) -> ScalarModel:
        settings = self.settings
        return load_scalar(spec, head_prefix=settings.head_prefix, require_head=True, normalize=settings.normalize)

    def rewards(self, texts: Ragged) -> Tensor:
        """Rewards of this rank's rows by every model, (B, K)."""
        columns = list[Tensor]()
        for model in self.models:
            score, limits = partial(self._score, model), self.settings.forward_limits
            columns.append(column_of(texts, score, limits, self.strategy, per_sample=True))
            model.rest()
        return torch.stack(columns, dim=1)

    def _score(self, model: FrozenModel, micro: Ragged) -> Tensor:
        return last_token_scores(model(micro.tokens, micro.offsets).values, micro.offsets)
