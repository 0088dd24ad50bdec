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

    f_e is how often expert e is chosen per token, and P_e its mean probability. The paper chooses
    one expert per token; here `top_k` experts are chosen. Layers are pooled, as in Transformers.
    The loss is `top_k` if all experts are used equally, and up to E if the same experts are always
    chosen. Only P has a gradient.
    """
    experts, tokens = router_logits[0].shape[-1], 0
    choices_by_layer: list[Tensor] = []
    probability_by_layer: list[Tensor] = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(top_k).indices.flatten()
        choices_by_layer.append(chosen.bincount(minlength=experts))
        probability_by_layer.append(probabilities.sum(0))
        tokens += len(logits)
    choices = torch.stack(choices_by_layer).sum(0) / tokens
    means = torch.stack(probability_by_layer).sum(0) / tokens
    return experts * (choices * means).sum()
