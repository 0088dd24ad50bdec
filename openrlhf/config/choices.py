"""Names and traits of registered choices. Their functions are in `openrlhf.algorithms`.

A name that a plug-in adds to a table becomes a choice of the table's flag.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """Requirements of an advantage estimator on a run."""

    # Compares the samples of a prompt: two or more of them, one reward per episode, no discount.
    needs_groups: bool = False
    needs_critic: bool = False  # reads the values V(s)
    whitened: bool = False  # whitens advantages over the whole batch


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Settings of a policy loss that hold unless flags change them."""

    aggregation: str = "token"  # if --algo.loss.aggregation is not given
    clip: tuple[float, float] | None = None  # if no clip flag is given; None: eps_clip


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
# Whether a preference loss needs a reference, by name.
PREFERENCE_LOSSES = {
    "dpo": True,
    "robust": True,
    "ipo": True,
    "hinge": True,
    "simpo": False,
    "orpo": False,
}
# Layouts of rows: detected from the columns, the column flags, or a format with its own columns.
LAYOUTS = ("auto", "columns", "alpaca", "arena", "chat", "orca", "webgpt")
# Presets of the correction of the train/rollout mismatch: level and mode of `algo.correction`. TIS:
# Yao et al. 2025, fengyao.notion.site/off-policy-rl (there, the band is [0, 2]). IcePop: Ling team
# 2025, ringtech.notion.site/icepop.
CORRECTIONS = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("geometric", "mask"),
}
# Where an estimator of KL(π‖π_ref) may be used. In the reward, its value has to be unbiased. In the
# loss, its expected gradient has to point to the reference.
KL_ESTIMATORS: dict[str, tuple[str, ...]] = {"k1": ("reward",), "k2": ("loss",), "k3": ("loss",)}
