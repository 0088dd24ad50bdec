"""Names and traits of registered choices. Their functions are in `openrlhf.algorithms`.

A name that a plug-in adds to a table becomes a choice of the table's flag.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """What an advantage estimator asks of a run."""

    needs_groups: bool = (
        False  # compares samples of one prompt: two or more, one number per episode, no discount
    )
    needs_critic: bool = False  # reads values V(s)
    whitened: bool = False  # advantages are normalised over the whole batch


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """What a policy loss brings with it."""

    aggregation: str = "token"  # used where --algo.loss.aggregation is not given
    clip: tuple[float, float] | None = None  # used where no clip flag is given, instead of eps_clip


ESTIMATORS = {
    "gae": EstimatorTraits(needs_critic=True, whitened=True),
    "reinforce": EstimatorTraits(whitened=True),
    "rloo": EstimatorTraits(needs_groups=True),
    "reinforce_baseline": EstimatorTraits(needs_groups=True, whitened=True),
    "group_norm": EstimatorTraits(needs_groups=True),
    "dr_grpo": EstimatorTraits(needs_groups=True),
}
POLICY_LOSSES = {
    "ppo": LossTraits(),
    "gspo": LossTraits(aggregation="sequence"),
    "cispo": LossTraits(clip=(1.0, 0.28)),
}
# By name, whether a preference loss reads a reference.
PREFERENCE_LOSSES = {
    "dpo": True,
    "robust": True,
    "ipo": True,
    "hinge": True,
    "simpo": False,
    "orpo": False,
}
# Of rows: from the columns; as the flags name them; or one whose texts are in several columns.
LAYOUTS = ("auto", "columns", "alpaca", "arena", "chat", "orca", "webgpt")
# Presets of the correction of train/rollout mismatch: level and mode of `algo.correction`. TIS: Yao
# et al. 2025, fengyao.notion.site/off-policy-rl (their own form is the band [0, 2]); IcePop: Ling
# team 2025, ringtech.notion.site/icepop.
CORRECTIONS = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("geometric", "mask"),
}
# Where an estimator of KL(π‖π_ref) belongs. Reward: it is unbiased as a number. Loss: its expected
# gradient leads to the reference.
KL_ESTIMATORS: dict[str, tuple[str, ...]] = {"k1": ("reward",), "k2": ("loss",), "k3": ("loss",)}
