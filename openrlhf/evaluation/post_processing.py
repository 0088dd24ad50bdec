"""Post-processors that turn outputs and their rewards into training rows."""

from collections.abc import Callable
from operator import itemgetter
from statistics import mean, stdev
from typing import Any

from openrlhf.config.inference import BatchInferenceConfig

Rows = list[dict[str, Any]]  # dicts with `input`, `output` and `reward`
REWARD = itemgetter("reward")


def by_input(rows: Rows) -> list[Rows]:
    """Group rows by input, in order of first appearance."""
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["input"], []).append(row)
    return list(groups.values())


def best(rows: Rows, config: BatchInferenceConfig) -> Rows:
    """Return the row with the highest reward for each input (rejection sampling).

    If several rows have the highest reward, the first is returned.
    """
    return [max(group, key=REWARD) for group in by_input(rows)]


def conditioned(rows: Rows, config: BatchInferenceConfig) -> Rows:
    """Return all rows with the reward inserted into the input.

    With --reward.normalize_enable, the inserted reward is (r − mean) ÷ standard deviation over all
    rows, with the unbiased deviation, in float64; it is 0 if all rewards are equal. The reward
    model's stored mean and deviation cancel out.
    """
    center = 0.0
    scale = 1.0
    if config.reward.normalize_enable:
        rewards = list(map(REWARD, rows))
        center = mean(rewards)
        if len(rewards) > 1:
            scale = stdev(rewards) or 1.0
    conditioned_rows: Rows = []
    for row in rows:
        reward = f"{(row['reward'] - center) / scale:.2f}"
        template = config.reward_template.replace("{reward}", reward)
        conditioned_rows.append(row | {"input": template.replace("{input}", row["input"])})
    return conditioned_rows


def pairs(rows: Rows, config: BatchInferenceConfig) -> Rows:
    """Return a pair for each input: the outputs with the highest and the lowest reward.

    Skips inputs for which both outputs or both rewards are equal.
    """
    found: Rows = []
    for group in by_input(rows):
        high = max(group, key=REWARD)
        low = min(group, key=REWARD)
        if high["reward"] > low["reward"] and high["output"] != low["output"]:
            pair = {
                "prompt": high["input"],
                "chosen": high["output"],
                "chosen_reward": high["reward"],
                "rejected": low["output"],
                "rejected_reward": low["reward"],
            }
            found.append(pair)
    return found


POST_PROCESSORS: dict[str, Callable[[Rows, BatchInferenceConfig], Rows]] = {
    "none": lambda rows, _: rows,
    "rs": best,
    "csft": conditioned,
    "iter_dpo": pairs,
}
