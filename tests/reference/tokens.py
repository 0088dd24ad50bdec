"""Token log-probabilities and entropies from one row of logits."""

import math


def log_softmax(logits: list[float], temperature: float) -> list[float]:
    scaled = [z / temperature for z in logits]
    highest = max(scaled)
    normaliser = highest + math.log(math.fsum(math.exp(z - highest) for z in scaled))
    return [z - normaliser for z in scaled]


def token_logprob(logits: list[float], target: int, temperature: float = 1.0) -> float:
    return log_softmax(logits, temperature)[target]


def entropy(logits: list[float], temperature: float = 1.0) -> float:
    return -math.fsum(math.exp(x) * x for x in log_softmax(logits, temperature))


def linear(hidden: list[float], weight: list[list[float]], bias: list[float]) -> list[float]:
    return [
        math.fsum(h * w for h, w in zip(hidden, row, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]
