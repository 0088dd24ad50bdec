"""Names and properties of registered choices; their functions live in `openrlhf.algorithms`.

The tables are live: `extend` adds a plug-in's name, and from then on the flag accepts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """What an advantage estimator asks of a run."""

    needs_groups: bool = False  # compares samples of one prompt: two or more, one number per episode, no discount
    needs_critic: bool = False  # reads values V(s)
    whitened: bool = False  # advantages are normalised over the whole batch


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """What a policy loss brings with it."""

    aggregation: str = "token"  # used where --algo.loss.aggregation is not given
    clip: tuple[float, float] | None = None  # used where no clip flag is given, instead of eps_clip


@dataclass(frozen=True, kw_only=True)
class CorrectionPreset:
    """A preset of the correction of train/rollout mismatch: two axes of `algo.correction`."""

    level: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class KLTraits:
    """Where an estimator of KL(π‖π_ref) belongs."""

    in_reward: bool = False  # unbiased as a number
    in_loss: bool = False  # its expected gradient leads to the reference


ESTIMATORS = {
    "gae": EstimatorTraits(needs_critic=True, whitened=True),
    "reinforce": EstimatorTraits(whitened=True),
    "rloo": EstimatorTraits(needs_groups=True),
    "reinforce_baseline": EstimatorTraits(needs_groups=True, whitened=True),
    "group_norm": EstimatorTraits(needs_groups=True),
    "dr_grpo": EstimatorTraits(needs_groups=True),
}
POLICY_LOSSES = {"ppo": LossTraits(), "gspo": LossTraits(aggregation="sequence"), "cispo": LossTraits(clip=(1.0, 0.28))}
CORRECTIONS = {
    "tis": CorrectionPreset(level="token", mode="clip"),
    "icepop": CorrectionPreset(level="token", mode="mask"),
    "seq-mask-tis": CorrectionPreset(level="geometric", mode="mask"),
}
KL_ESTIMATORS = {"k1": KLTraits(in_reward=True), "k2": KLTraits(in_loss=True), "k3": KLTraits(in_loss=True)}

Properties = EstimatorTraits | LossTraits | CorrectionPreset | KLTraits
TABLES: dict[type[Properties], dict[str, Any]] = {
    EstimatorTraits: ESTIMATORS,
    LossTraits: POLICY_LOSSES,
    CorrectionPreset: CORRECTIONS,
    KLTraits: KL_ESTIMATORS,
}


def extend(name: str, properties: Properties) -> None:
    """Make `name` a choice of the flag these properties belong to. ValueError when it is taken."""
    kind = type(properties)
    if name in TABLES[kind]:
        raise ValueError(f"{kind.__name__} {name!r} is there already: use another name.")
    TABLES[kind][name] = properties
