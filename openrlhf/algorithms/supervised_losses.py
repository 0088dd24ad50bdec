"""Losses of the offline stages."""

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Pairs = Float[Tensor, " P"]


def token_nll(logprobs: Float[Tensor, "*s"], loss_mask: Bool[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """−log p of every target token in nats, zero elsewhere."""
    return -logprobs.masked_fill(~loss_mask, 0)


def log_sigmoid(chosen: Pairs, rejected: Pairs, margin: Pairs | None = None) -> Pairs:
    """−log σ(r_chosen − r_rejected − margin), finite for all rewards.     Ouyang et al. 2022, eq. 1, arXiv:2203.02155

    The same as log(1 + exp(r_rejected + margin − r_chosen)). The margin: Touvron et al. 2023, eq. 2, arXiv:2307.09288
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)
