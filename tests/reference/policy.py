"""Policy and value losses, corrections and KL estimates, implemented from the papers."""

import math

Row = list[float]
Mask = list[bool]


def kl(x: float, estimator: str) -> float:
    ratio = math.exp(min(-x, 700.0))  # π_ref / π
    value = {"k1": x, "k2": x * x / 2, "k3": ratio - 1 + x}[estimator]
    return min(max(value, -10.0), 10.0)


def adaptive_coefficients(
    coef: float, measured: list[tuple[float, int]], target: float, horizon: int
) -> list[float]:
    """Return β after each (KL, samples): e = clip(KL / target − 1, ±0.2), β ← β (1 + K e).

    Ziegler et al. 2019, §2.2; K = n / horizon, at most 1.
    """
    path = []
    for kl, n in measured:
        error = kl / target - 1
        error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        coef = coef + coef * error * (n / horizon if n < horizon else 1.0)
        path.append(coef)
    return path


def surrogate(rho: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    held = min(max(rho, 1 - low), 1 + high)
    objective = min(rho * advantage, held * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def ppo(
    logprobs: Row,
    old: Row,
    advantages: Row,
    mask: Mask,
    low: float,
    high: float,
    dual: float | None,
) -> Row:
    rows = zip(logprobs, old, advantages, mask, strict=True)
    return [surrogate(math.exp(n - o), a, low, high, dual) if m else 0.0 for n, o, a, m in rows]


def gspo(
    logprobs: Row,
    old: Row,
    advantages: Row,
    mask: Mask,
    low: float,
    high: float,
    dual: float | None,
) -> Row:
    """Compute s = (π_θ(y) / π_old(y)) ^ (1 / |y|), which all tokens of the row share."""
    actions = [t for t, acting in enumerate(mask) if acting]
    product = math.prod(math.exp(logprobs[t] - old[t]) for t in actions)
    s = product ** (1 / len(actions)) if actions else 1.0
    return [
        surrogate(s, a, low, high, dual) if m else 0.0
        for a, m in zip(advantages, mask, strict=True)
    ]


def cispo(
    logprobs: Row,
    old: Row,
    advantages: Row,
    mask: Mask,
    low: float,
    high: float,
    dual: float | None,
) -> Row:
    rows = zip(logprobs, old, advantages, mask, strict=True)
    return [
        -min(max(math.exp(n - o), 1 - low), 1 + high) * a * n if m else 0.0 for n, o, a, m in rows
    ]


def value(v: float, old: float, target: float, clip: float) -> float:
    held = old + min(max(v - old, -clip), clip)
    return 0.5 * max((v - target) ** 2, (held - target) ** 2)


def aggregate(terms: list[Row], masks: list[Mask], kind: str, max_tokens: int) -> float:
    """Aggregate the entire window as one list of rows."""
    rows = [
        [x for x, m in zip(row, mask, strict=True) if m]
        for row, mask in zip(terms, masks, strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if kind == "token":
        return math.fsum(map(math.fsum, rows)) / sum(map(len, rows))
    if kind == "sequence":
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    return math.fsum(math.fsum(row) / max_tokens for row in rows) / len(rows)


def mismatch(
    old: list[Row], rollout: list[Row], masks: list[Mask]
) -> tuple[int, float, float, float, float]:
    """Return (token count, Σ Δ, Σ |Δ|, max |Δ|, Σ exp(−Δ)) over the sampled tokens.

    Δ = log π_rollout − log π_old.
    """
    rows = zip(old, rollout, masks, strict=True)
    gaps = [r - o for row in rows for o, r, m in zip(*row, strict=True) if m]
    sizes = [abs(gap) for gap in gaps]
    return (
        len(gaps),
        math.fsum(gaps),
        math.fsum(sizes),
        max(sizes, default=0.0),
        math.fsum(math.exp(-g) for g in gaps),
    )


def gate(old: Row, rollout: Row, mask: Mask, level: str, gating: str = "ratio") -> Row:
    """Return, for every token, the statistic that is compared with the band."""
    values = []
    for log_q, log_p in zip(old, rollout, strict=True):
        p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (log_p, log_q))
        if gating == "ratio":
            values.append(log_q - log_p)
        elif gating == "tv":
            values.append(abs(p - q))
        else:
            values.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    acting = [value for value, acts in zip(values, mask, strict=True) if acts]
    if level == "seq":
        values = [math.fsum(acting) / max(len(acting), 1)] * len(values)
    elif level == "seq-product":
        values = [math.fsum(acting)] * len(values)
    if gating == "ratio":
        return [math.exp(min(max(value, -20), 20)) for value in values]
    return values


def correction(
    old: Row,
    rollout: Row,
    mask: Mask,
    level: str,
    mode: str,
    low: float,
    high: float,
    gating: str = "ratio",
) -> Row:
    """Return the weight of every token: ω, or the gate's ratio clipped to the band."""
    weights = []
    gated = gate(old, rollout, mask, level, gating)
    for log_q, log_p, statistic, acts in zip(old, rollout, gated, mask, strict=True):
        if not acts:
            weights.append(0.0)
        elif mode == "clip":
            weights.append(min(max(statistic, low), high))
        elif low <= statistic <= high:
            weights.append(math.exp(log_q - log_p))
        else:
            weights.append(0.0)
    return weights


def unbiased_kl(
    logprob: float, old: float, reference: float, estimator: str
) -> tuple[float, float]:
    """Return one token's KL term, and the term's derivative with respect to log π_θ."""
    x = logprob - reference
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]
    weight = min(math.exp(logprob - old), 10.0)
    return min(max(value, -10.0), 10.0), weight * x
