"""Losses of the offline stages, computed one pair, row or token at a time."""

import math
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.batches import TokenRows


def mean_loss(model: Any, rows: TokenRows) -> Tensor:
    """Return the mean negative log-likelihood of the target tokens in float64.

    The Transformers model `model` computes full logits, one row at a time.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(rows.num_rows):
        one = rows.select([row])
        logprobs = torch.log_softmax(model(one.tokens[None]).logits[0], -1)
        for t in one.loss_mask.nonzero()[:, 0].tolist():
            loss = loss - logprobs[t - 1, one.tokens[t]]
    return loss / int(rows.loss_mask.sum())


def pairwise(chosen: float, rejected: float, margin: float = 0.0) -> float:
    """Compute −log σ(chosen − rejected − margin).

    The loss is the logarithm of 1 + exp(−x), computed without overflow.
    """
    x = chosen - rejected - margin
    return math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))
