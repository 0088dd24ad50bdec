"""Losses of the offline stages."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
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


def soft_cross_entropy(
    logits: Float[Tensor, "K V"], teacher: Float[Tensor, "K k"], tokens: Int[Tensor, "K k"] | None = None
) -> Float[Tensor, " K"]:
    """−Σ_v p_T(v) log p_S(v) of every place, in nats.     Hinton et al. 2015, arXiv:1503.02531

    `teacher`: its logits for all tokens, or for the k `tokens` that it gives most to, whose probabilities then sum to 1.
    A token that the teacher rules out adds 0, even if the student rules it out too (both logits −∞).
    """
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs if tokens is None else logprobs.gather(1, tokens)
    weights = torch.softmax(teacher.to(logits.dtype), -1)
    return -(weights * chosen.masked_fill(weights == 0, 0.0)).sum(-1)
