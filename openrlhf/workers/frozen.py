"""Models that only run forward: the reference policy, the teacher and reward models."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openrlhf.batches import Ragged, TokenRows
from openrlhf.config.rollout import RewardConfig
from openrlhf.distributed.strategy import FrozenModel, Strategy
from openrlhf.models.loading import LoadSpec
from openrlhf.models.policy import PolicyModel
from openrlhf.models.proof import prove_layout
from openrlhf.models.scalar import ScalarModel, last_token_scores, load_scalar
from openrlhf.workers.base import MicroBatchLimits, RoleSettings, column_of
from openrlhf.workers.steps import StepScorer


class ReferenceWorker:
    """A frozen policy: π_ref, or the teacher."""

    def __init__(self, strategy: Strategy, settings: RoleSettings) -> None:
        config, load = settings.config, settings.load
        self.strategy, self.temperature = strategy, config.rollout.temperature
        self.limits = MicroBatchLimits.of_forwards(config.rollout, config.ds)
        self.model = FrozenModel(
            strategy, partial(PolicyModel.load, load), offload=config.ref.offload
        )
        prove_layout(self.model.on_device())
        self.model.rest()

    def logprobs(self, rows: TokenRows) -> Tensor:
        """Log-probability of every target of this rank's rows, (N,)."""
        column = column_of(rows, self._score, self.limits, self.strategy)
        self.model.rest()
        return column

    def _score(self, micro: TokenRows) -> Tensor:
        return self.model(micro.tokens, micro.offsets, micro.loss_mask, self.temperature).logprobs


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """The settings of a reward worker."""

    models: tuple[LoadSpec, ...]
    process_model: LoadSpec | None
    limits: MicroBatchLimits
    head_prefix: str
    reward: RewardConfig


class RewardWorker:
    """Trained reward models. Each gives a finished episode one number, the output at the last
    token.

    A process reward model gives each step of an episode a number.
    """

    def __init__(self, strategy: Strategy, settings: RewardModelSettings) -> None:
        self.strategy, self.settings, offload = strategy, settings, settings.reward.offload
        self.models = [
            FrozenModel(strategy, partial(self._load, spec), offload=offload)
            for spec in settings.models
        ]
        self.steps: StepScorer | None = None
        if settings.process_model:
            separator = settings.reward.step_separator
            self.steps = StepScorer(
                strategy, settings.process_model, separator=separator, offload=offload
            )
        for model in [*self.models, *([self.steps.model] if self.steps else [])]:
            prove_layout(model.on_device())
            model.rest()

    def step_rewards(self, answers: TokenRows) -> Tensor:
        """Rewards of the steps of this rank's rows by the process reward model, (N,): see
        `StepScorer.rewards`.
        """
        assert self.steps
        column = column_of(answers, self.steps.rewards, self.settings.limits, self.strategy)
        self.steps.model.rest()
        return column

    def _load(self, spec: LoadSpec) -> ScalarModel:
        prefix, normalize = self.settings.head_prefix, self.settings.reward.normalize_enable
        return load_scalar(spec, head_prefix=prefix, require_head=True, normalize=normalize)

    def rewards(self, texts: Ragged) -> Tensor:
        """Rewards of this rank's rows by every model, (B, K)."""
        columns = list[Tensor]()
        for model in self.models:
            score = partial(self._score, model)
            columns.append(
                column_of(texts, score, self.settings.limits, self.strategy, per_sample=True)
            )
            model.rest()
        return torch.stack(columns, dim=1)

    def _score(self, model: FrozenModel, micro: Ragged) -> Tensor:
        return last_token_scores(model(micro.tokens, micro.offsets).values, micro.offsets)
