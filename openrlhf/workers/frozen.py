"""Models that run only forward passes: the reference policy, the teacher and reward models."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openrlhf.checks import Finding, report
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.batches import Ragged, TokenRows
from openrlhf.models.loading import LoadSpec
from openrlhf.models.policy import PolicyModel
from openrlhf.models.proof import prove_layout
from openrlhf.models.scalar import last_token_scores, load_scalar
from openrlhf.training.strategy import FrozenModel, Strategy
from openrlhf.workers.base import MicroBatchLimits, RoleSettings, column_of
from openrlhf.workers.steps import StepScorer


class ReferenceWorker:
    """A frozen policy: π_ref, or the teacher."""

    def __init__(self, strategy: Strategy, settings: RoleSettings) -> None:
        config = settings.config
        self.strategy = strategy
        self.temperature = config.rollout.temperature
        load_model = partial(PolicyModel.load, settings.load)
        self.model = FrozenModel(strategy, load_model, offload=config.ref.offload)
        limits = MicroBatchLimits.of_forwards(config.rollout, config.ds)
        self.limits = limits.for_model(self.model.config)
        report(*prove_layout(self.model.on_device()))
        self.model.rest()

    def logprobs(self, rows: TokenRows) -> Tensor:
        """Return the log-probability of every target token in this rank's rows, (N,)."""
        column = column_of(rows, self._score, self.limits, self.strategy)
        self.model.rest()
        return column

    def _score(self, micro: TokenRows) -> Tensor:
        return self.model(micro.tokens, micro.offsets, micro.loss_mask, self.temperature).logprobs


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """Settings for a reward worker."""

    models: tuple[LoadSpec, ...]
    process_model: LoadSpec | None
    limits: MicroBatchLimits
    head_prefix: str
    reward: RewardConfig


class RewardWorker:
    """Trained reward models.

    Each model scores a finished episode with its output at the last token.

    A process reward model scores each step of an episode.
    """

    def __init__(self, strategy: Strategy, settings: RewardModelSettings) -> None:
        self.strategy = strategy
        self.settings = settings
        offload = settings.reward.offload
        self.models: list[FrozenModel] = []
        for spec in settings.models:
            load_model = partial(
                load_scalar,
                spec,
                head_prefix=settings.head_prefix,
                require_head=True,
                normalize=settings.reward.normalize_enable,
            )
            self.models.append(FrozenModel(strategy, load_model, offload=offload))
        models = list(self.models)
        self.step_scorer: StepScorer | None = None
        if settings.process_model:
            self.step_scorer = StepScorer(
                strategy,
                settings.process_model,
                separator=settings.reward.step_separator,
                offload=offload,
            )
            models.append(self.step_scorer.model)
        found: list[Finding] = []
        for model in models:
            found += prove_layout(model.on_device())
            model.rest()
        report(*found)

    def step_rewards(self, answers: TokenRows) -> Tensor:
        """Return the process reward model's step rewards for this rank's rows, (N,).

        The step rewards are defined in `StepScorer.rewards`.
        """
        assert self.step_scorer
        model = self.step_scorer.model
        limits = self.settings.limits.for_model(model.config)
        column = column_of(answers, self.step_scorer.rewards, limits, self.strategy)
        model.rest()
        return column

    def rewards(self, texts: Ragged) -> Tensor:
        """Return every model's rewards for this rank's rows, (B, K)."""
        columns: list[Tensor] = []
        for model in self.models:
            limits = self.settings.limits.for_model(model.config)
            values = column_of(texts, partial(self._values, model), limits, self.strategy)
            columns.append(last_token_scores(values, texts.offsets))
            model.rest()
        return torch.stack(columns, dim=1)

    def _values(self, model: FrozenModel, micro: Ragged) -> Tensor:
        return model(micro.tokens, micro.offsets).values
