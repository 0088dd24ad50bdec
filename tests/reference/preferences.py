"""Losses of a pair or a labeled answer, computed from sums of log-probabilities."""

import math


def log_sigmoid(x: float) -> float:
    """Compute log σ(x) without overflow."""
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def pair_loss(
    name: str,
    ours: tuple[float, float],
    theirs: tuple[float, float],
    lengths: tuple[int, int],
    beta: float,
    eps: float,
    gamma: float,
) -> float:
    """Return the loss of a pair.

    `ours` and `theirs` are the policy's and the reference's (chosen, rejected) log-probability
    sums; `lengths` are token counts.
    """
    h = ours[0] - theirs[0] - ours[1] + theirs[1]
    means = [total / length for total, length in zip(ours, lengths, strict=True)]
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
    match name:
        case "dpo":
            return -(1 - eps) * log_sigmoid(beta * h) - eps * log_sigmoid(-beta * h)
        case "robust":
            return (-(1 - eps) * log_sigmoid(beta * h) + eps * log_sigmoid(-beta * h)) / (
                1 - 2 * eps
            )
        case "ipo":
            return (h - 1 / (2 * beta)) ** 2
        case "hinge":
            return max(0.0, 1 - beta * h)
        case "simpo":
            return -log_sigmoid(beta * (means[0] - means[1]) - gamma)
        case "orpo":
            return -means[0] - beta * log_sigmoid(math.log(odds[0] / odds[1]))
        case _:
            raise ValueError(name)


def answer_loss(
    ratio: float, desirable: bool, kl: float, beta: float, weights: tuple[float, float]
) -> float:
    """Compute the KTO loss of one answer: λ_y − v(x, y), eq. 8 of arXiv:2402.01306."""
    point = max(kl, 0.0)
    if desirable:
        return weights[0] * (1 - 1 / (1 + math.exp(-beta * (ratio - point))))
    return weights[1] * (1 - 1 / (1 + math.exp(-beta * (point - ratio))))
