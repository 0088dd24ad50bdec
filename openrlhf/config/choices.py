"""Names and traits of estimators, losses and corrections, without torch.

The algorithms register their functions under these names. A name that a plug-in registers is added
to its table, and becomes a choice of the table's flag.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """Requirements of an advantage estimator on a run."""

    # Compares the samples of a prompt: two or more of them, one reward per episode, no discount.
    per_group: bool = False
    needs_critic: bool = False  # reads the values V(s)
    whiten: bool = False  # whitens advantages over all action tokens of the batch


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Settings of a policy loss, as in its paper, that hold unless flags change them."""

    aggregation: str = "token"  # if --algo.loss.aggregation is not given
    clip: tuple[float, float] | None = None  # if no clip flag is given; None: eps_clip


@dataclass(frozen=True, kw_only=True)
class PreferenceLossTraits:
    """Requirements of a preference loss on a run."""

    needs_reference: bool = True


@dataclass(frozen=True, kw_only=True)
class KLTraits:
    """Terms in which an estimator of KL(π‖π_ref) may be used.

    In the reward, its value has to be unbiased. In the loss, its expected gradient has to point to
    the reference.
    """

    terms: tuple[str, ...] = ("reward", "loss")


ESTIMATORS = {
    "gae": EstimatorTraits(needs_critic=True, whiten=True),
    "reinforce": EstimatorTraits(whiten=True),
    "rloo": EstimatorTraits(per_group=True),
    "reinforce_baseline": EstimatorTraits(per_group=True, whiten=True),
    "group_norm": EstimatorTraits(per_group=True),
    "dr_grpo": EstimatorTraits(per_group=True),
}
POLICY_LOSSES = {
    "ppo": LossTraits(),
    "gspo": LossTraits(aggregation="sequence"),
    "cispo": LossTraits(clip=(1.0, 0.28)),
}
PREFERENCE_LOSSES = {
    "dpo": PreferenceLossTraits(),
    "robust": PreferenceLossTraits(),
    "ipo": PreferenceLossTraits(),
    "hinge": PreferenceLossTraits(),
    "simpo": PreferenceLossTraits(needs_reference=False),
    "orpo": PreferenceLossTraits(needs_reference=False),
}
KL_ESTIMATORS = {
    "k1": KLTraits(terms=("reward",)),
    "k2": KLTraits(terms=("loss",)),
    "k3": KLTraits(terms=("loss",)),
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
