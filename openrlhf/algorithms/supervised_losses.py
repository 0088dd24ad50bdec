"""Loss functions for the offline stages."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Pairs = Float[Tensor, " P"]


def token_nll(logprobs: Float[Tensor, "*s"], loss_mask: Bool[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return −log p of every target token in nats, zero elsewhere."""
    return -logprobs.masked_fill(~loss_mask, 0)


def log_sigmoid(chosen: Pairs, rejected: Pairs, margin: Pairs | None = None) -> Pairs:
    """Compute −log σ(r_chosen − r_rejected − margin), which is finite for all rewards.

    Ouyang et al. 2022, eq. 1, arXiv:2203.02155; the margin: Touvron et al. 2023, eq. 2,
    arXiv:2307.09288

    The loss equals log(1 + exp(r_rejected + margin − r_chosen)).
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    return -F.logsigmoid(difference)


def soft_cross_entropy(
    logits: Float[Tensor, "K V"],
    teacher: Float[Tensor, "K k"],
    tokens: Int[Tensor, "K k"] | None = None,
) -> Float[Tensor, " K"]:
    """Compute −Σ_v p_T(v) log p_S(v) at every position, in nats.

    Hinton et al. 2015, arXiv:1503.02531

    `teacher` holds the teacher's logits for the entire vocabulary, or for its top k `tokens`, whose
    probabilities are then renormalized to sum to 1. A token with teacher probability 0 contributes
    0, even if the student's logit is also −∞.
    """
    logprobs = torch.log_softmax(logits, -1)
    if tokens is not None:
        logprobs = logprobs.gather(1, tokens)
    weights = torch.softmax(teacher.to(logits.dtype), -1)
    terms = weights * logprobs.masked_fill(weights == 0, 0.0)
    return -terms.sum(-1)
