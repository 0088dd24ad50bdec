"""The load-balancing loss of mixtures of experts."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def load_balancing_loss(
    router_logits: Sequence[Float[Tensor, "N E"]], *, top_k: int
) -> Float[Tensor, ""]:
    """Compute E · Σ_e f_e · P_e over the tokens of all layers.

    Fedus et al. 2021, eqs. 4–6, arXiv:2101.03961

    f_e is the number of times expert e is chosen per token, and P_e is the expert's mean
    probability. The paper chooses one expert per token; here `top_k` experts are chosen. Layers are
    pooled, as in Transformers. The loss is `top_k` if all experts are used equally, and up to E if
    the same experts are always chosen. Only P has a gradient.
    """
    experts = router_logits[0].shape[-1]
    tokens = sum(len(logits) for logits in router_logits)
    choices: list[Tensor] = []
    probabilities: list[Tensor] = []
    for logits in router_logits:
        layer = logits.float().softmax(-1)
        choices.append(layer.topk(top_k).indices.flatten().bincount(minlength=experts))
        probabilities.append(layer.sum(0))
    frequencies = torch.stack(choices).sum(0) / tokens
    return experts * (frequencies * (torch.stack(probabilities).sum(0) / tokens)).sum()
