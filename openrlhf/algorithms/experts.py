"""Mixtures of experts: how evenly the routers use them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Float[Tensor, "N E"]], *, top_k: int) -> Float[Tensor, ""]:
    """E · Σ_e f_e · P_e over the tokens of all layers.     Fedus et al. 2021, eqs. 4–6, arXiv:2101.03961

    f_e is the number of choices of expert e per token, P_e the mean probability of expert e. The paper has one choice
    per token; here there are `top_k`. Layers are pooled, as Transformers does. The loss is `top_k` if every expert is
    used alike, and up to E if the same experts are always chosen. The gradient goes through P alone.
    """
    probabilities = [logits.float().softmax(-1) for logits in router_logits]
    experts, tokens = probabilities[0].shape[-1], sum(len(layer) for layer in probabilities)
    chosen = [layer.topk(top_k).indices.flatten().bincount(minlength=experts) for layer in probabilities]
    choices = torch.stack(chosen).sum(0) / tokens
    means = torch.stack([layer.sum(0) for layer in probabilities]).sum(0) / tokens
    return experts * (choices * means).sum()
