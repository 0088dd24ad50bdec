"""From answers with rewards to the rows of the next training."""

from collections.abc import Callable
from operator import itemgetter
from statistics import mean, stdev
from typing import Any

from openrlhf.config.inference import BatchInferenceConfig

Rows = list[dict[str, Any]]  # with `input`, `output` and `reward`
REWARD = itemgetter("reward")


def by_input(rows: Rows) -> list[Rows]:
    """The rows of each input, in the order in which the inputs first appear."""
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["input"], []).append(row)
    return list(groups.values())


def best(rows: Rows, config: BatchInferenceConfig) -> Rows:
    """The row with the highest reward of each input, for rejection sampling. Of equal rewards, the
    first.
    """
    return [max(group, key=REWARD) for group in by_input(rows)]


def conditioned(rows: Rows, config: BatchInferenceConfig) -> Rows:
    """All rows, with the reward in the input.

    With --reward.normalize_enable that is (r − mean) ÷ standard deviation of all rows, the unbiased
    one, in float64; 0 if all rewards are equal. The stored mean and deviation of the reward model
    cancel.
    """
    rewards, center, scale = [row["reward"] for row in rows], 0.0, 1.0
    if config.reward.normalize_enable:
        center, scale = mean(rewards), (stdev(rewards) if len(rewards) > 1 else 0.0) or 1.0
    templates = (
        config.reward_template.replace("{reward}", f"{(reward - center) / scale:.2f}")
        for reward in rewards
    )
    return [
        row | {"input": text.replace("{input}", row["input"])}
        for row, text in zip(rows, templates, strict=True)
    ]


def pairs(rows: Rows, config: BatchInferenceConfig) -> Rows:
    """The outputs with the highest and the lowest reward of each input. Equal rewards or equal
    outputs make no pair.
    """
    ends = ((max(group, key=REWARD), min(group, key=REWARD)) for group in by_input(rows))
    return [
        {"prompt": high["input"], "chosen": high["output"], "chosen_reward": high["reward"]}
        | {"rejected": low["output"], "rejected_reward": low["reward"]}
        for high, low in ends
        if high["reward"] > low["reward"] and high["output"] != low["output"]
    ]


POST_PROCESSORS: dict[str, Callable[[Rows, BatchInferenceConfig], Rows]] = {
    "none": lambda rows, _: rows,
    "rs": best,
    "csft": conditioned,
    "iter_dpo": pairs,
}
