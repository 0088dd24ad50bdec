"""Knowledge distillation: the student's distribution of the next token comes closer to the teacher's."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def soft_cross_entropy(
    logits: Float[Tensor, "K V"], teacher: Float[Tensor, "K k"], tokens: Int[Tensor, "K k"] | None = None
) -> Float[Tensor, " K"]:
    """−Σ_v p_T(v) log p_S(v) of every place, in nats.     Hinton et al. 2015, arXiv:1503.02531

    `teacher`: its logits for all tokens, or for the k `tokens` that it gives most to, whose probabilities then sum to 1.
    """
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs if tokens is None else logprobs.gather(1, tokens)
    return -(torch.softmax(teacher.to(logits.dtype), -1) * chosen).sum(-1)
