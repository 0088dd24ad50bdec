"""Diagnoses optimizer steps whose loss or gradient is NaN or infinite."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from openrlhf.config.flags import UserError
from openrlhf.observability.metrics import Metric, values
from openrlhf.training.strategy import Strategy


class NonFiniteError(UserError, RuntimeError):
    """Error for too many consecutive optimizer steps whose loss or gradient is NaN or infinite."""


class LossTerm(NamedTuple):
    """A micro-batch's contribution to the window's loss, and its metrics."""

    loss: Tensor
    metrics: dict[str, Metric]


@contextmanager
def watched_gradients(module: nn.Module, *, enabled: bool) -> Iterator[list[str]]:
    """Collect the names of parameters that get a non-finite gradient before the block exits.

    The parameter closest to the loss comes first. ZeRO frees the gradients before their norm is
    known, so hooks check each gradient. Because these checks take time, the hooks are `enabled`
    only after a skipped step.
    """
    broken: list[str] = []

    def check(name: str, gradient: Tensor) -> None:
        if not gradient.isfinite().all():
            broken.append(name)

    hooks = []
    if enabled:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(partial(check, name)))
    yield broken
    for hook in hooks:
        hook.remove()


def describe_cause(strategy: Strategy, terms: Sequence[LossTerm], broken: Sequence[str]) -> str:
    """Describe the first non-finite loss on any rank, or else the non-finite gradients. Collective.

    `broken` contains the names from `watched_gradients`.
    """
    losses: list[str] = []
    for number, term in enumerate(terms, 1):
        if not term.loss.isfinite():
            losses.append(
                f"the loss of micro-batch {number} of {len(terms)} on rank {strategy.rank} was "
                f"{float(term.loss)}, with the metrics {values(term.metrics)}"
            )
    names: dict[str, None] = {}  # an ordered set
    for rank_losses, rank_broken in strategy.gather_ranks((losses, broken)):
        if rank_losses:
            return rank_losses[0]
        names |= dict.fromkeys(rank_broken)
    if not names:
        return "all losses were finite, but some gradients were not"
    first_names = ", ".join(list(names)[:3])
    return (
        f"all losses were finite, but not the gradients of {len(names)} parameter(s): {first_names}"
    )
