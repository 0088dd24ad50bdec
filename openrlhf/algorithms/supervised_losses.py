"""Losses of the offline stages."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from openrlhf.algorithms.registry import Registry

Pairs = Float[Tensor, " P"]


@runtime_checkable
class PairwiseLoss(Protocol):
    """Rewards of the chosen and the rejected responses, and margins if there are any, to (P,)."""

    def __call__(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor: ...


PAIRWISE_LOSSES: Registry[PairwiseLoss] = Registry("pairwise loss")


def token_nll(logprobs: Float[Tensor, "*s"], loss_mask: Bool[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """−log p of every target token, nats, zero elsewhere."""
    return -logprobs.masked_fill(~loss_mask, 0)


@PAIRWISE_LOSSES.register("sigmoid")
def log_sigmoid(chosen: Pairs, rejected: Pairs, margin: Pairs | None = None) -> Pairs:
    """−log σ(r_chosen − r_rejected − margin), finite for all rewards.

    Ouyang et al. 2022, eq. 1, arXiv:2203.02155; the margin: Touvron et al. 2023, eq. 2,
    arXiv:2307.09288
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


@PAIRWISE_LOSSES.register("logexp")
def log_exp(chosen: Pairs, rejected: Pairs, margin: Pairs | None = None) -> Pairs:
    """log(1 + exp(r_rejected − r_chosen)): `log_sigmoid` by another name; ignores a margin."""
    return log_sigmoid(chosen, rejected)
