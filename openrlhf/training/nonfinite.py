"""Diagnosis of optimizer steps whose loss or gradient is NaN or infinite."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from openrlhf.config.flags import UserError
from openrlhf.observability.metrics import Metric, values
from openrlhf.training.strategy import Strategy


class NonFiniteError(UserError, RuntimeError):
    """The loss or gradient of too many optimizer steps in a row was NaN or infinite."""


class LossTerm(NamedTuple):
    """A micro-batch's contribution to the window's loss, and its metrics."""

    loss: Tensor
    metrics: dict[str, Metric]


def describe_cause(strategy: Strategy, terms: Sequence[LossTerm]) -> str:
    """Describe the first non-finite loss of any rank, or else blame the gradients. Collective."""
    losses: list[str] = []
    for number, term in enumerate(terms, 1):
        if not term.loss.isfinite():
            losses.append(
                f"the loss of micro-batch {number} of {len(terms)} on rank {strategy.rank} was "
                f"{float(term.loss)}, with the metrics {values(term.metrics)}"
            )
    for rank_losses in strategy.gather_ranks(losses):
        if rank_losses:
            return rank_losses[0]
    return "all losses were finite, but some gradients were not"
