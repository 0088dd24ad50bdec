"""Losses of the offline stages for a single pair or token."""

import math


def pairwise(chosen: float, rejected: float, margin: float = 0.0) -> float:
    """Compute −log σ(chosen − rejected − margin).

    The loss is the logarithm of 1 + exp(−x), computed without overflow.
    """
    x = chosen - rejected - margin
    return math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))
