"""Rewards and advantages of one row or of a batch's samples, implemented from the papers."""

import math
import statistics
from collections import defaultdict

Row = list[float]
Mask = list[bool]


def token_rewards(reward: float, kl: Row, mask: Mask, coef: float) -> Row:
    actions = [t for t, acting in enumerate(mask) if acting]
    row = [0.0] * len(mask)
    for t in actions:
        row[t] = -coef * kl[t] + (reward if t == actions[-1] else 0.0)
    return row


def overlong(length: int, max_length: int, cache: float, factor: float) -> float:
    """Compute `factor` · eq. 13 of Yu et al. 2025, with L_max = max_length and L_cache = cache."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return factor * ((max_length - cache) - length) / cache
    return -factor


def gae(rewards: Row, values: Row, mask: Mask, gamma: float, lam: float) -> tuple[Row, Row]:
    """Compute eq. 16 of Schulman et al. 2016 as an explicit sum over all later residuals."""
    actions = [t for t, acting in enumerate(mask) if acting]
    residuals = []
    for i, t in enumerate(actions):
        next_value = values[actions[i + 1]] if i + 1 < len(actions) else 0.0
        residuals.append(rewards[t] + gamma * next_value - values[t])
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(actions):
        advantages[t] = math.fsum(
            (gamma * lam) ** later * delta for later, delta in enumerate(residuals[i:])
        )
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def discounted_returns(rewards: Row, mask: Mask, gamma: float) -> Row:
    actions = [t for t, acting in enumerate(mask) if acting]
    row = [0.0] * len(mask)
    for i, t in enumerate(actions):
        row[t] = math.fsum(gamma**later * rewards[u] for later, u in enumerate(actions[i:]))
    return row


def whiten(x: Row, mask: Mask, scale: bool = True) -> Row:
    selected = [v for v, wanted in zip(x, mask, strict=True) if wanted]
    if not selected:
        return [0.0] * len(x)
    mean = math.fsum(selected) / len(selected)
    variance = math.fsum((v - mean) ** 2 for v in selected) / len(selected)
    divisor = math.sqrt(max(variance, 1e-8)) if scale else 1.0
    return [(v - mean) / divisor if wanted else 0.0 for v, wanted in zip(x, mask, strict=True)]


def shaped(name: str, rewards: Row, groups: list[int]) -> Row:
    """Return the shaped reward of every sample.

    Group estimators give 0 to a sample that is the only sample in its group.
    """
    members = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    result = []
    for i, group in enumerate(groups):
        others = [rewards[j] for j in members[group] if j != i]
        everyone = [*others, rewards[i]]
        if name in ("gae", "reinforce"):
            result.append(rewards[i])
        elif name == "flash_reinforce":
            result.append(rewards[i] - math.fsum(rewards) / len(rewards))
        elif not others:
            result.append(0.0)
        elif name == "rloo":
            result.append(rewards[i] - math.fsum(others) / len(others))
        elif name in ("reinforce_baseline", "dr_grpo"):
            result.append(rewards[i] - math.fsum(everyone) / len(everyone))
        elif name == "group_norm":
            mean = math.fsum(everyone) / len(everyone)
            result.append((rewards[i] - mean) / (statistics.stdev(everyone) + 1e-9))
    return result
