"""Names and properties of registered choices; their functions live in `openrlhf.algorithms`.

The tables are live: `extend` adds a plug-in's name, and from then on the flag accepts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """What an advantage estimator asks of a run."""

    needs_groups: bool = False  # compares samples of one prompt: two or more of them
    needs_critic: bool = False  # reads values V(s)
    whitened: bool = False  # advantages are normalised over the whole batch
    forces_gamma_one: bool = False  # one number per episode: discounting has no meaning


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """What a policy loss brings with it."""

    aggregation: str = "token"  # used where --algo.loss.aggregation is not given
    clip: tuple[float, float] | None = None  # used where no clip flag is given, instead of eps_clip


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A preset of the correction of train/rollout mismatch: two axes of `algo.correction`."""

    level: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class KLEstimator:
    """Where an estimator of KL(π‖π_ref) belongs."""

    in_reward: bool = False  # unbiased as a number
    in_loss: bool = False  # its expected gradient leads to the reference


ESTIMATORS = {
    "gae": Estimator(needs_critic=True, whitened=True),
    "reinforce": Estimator(whitened=True),
    "rloo": Estimator(needs_groups=True, forces_gamma_one=True),
    "reinforce_baseline": Estimator(needs_groups=True, whitened=True, forces_gamma_one=True),
    "group_norm": Estimator(needs_groups=True, forces_gamma_one=True),
    "dr_grpo": Estimator(needs_groups=True, forces_gamma_one=True),
}
POLICY_LOSSES = {"ppo": PolicyLoss(), "gspo": PolicyLoss(aggregation="sequence"), "cispo": PolicyLoss(clip=(1.0, 0.28))}
CORRECTIONS = {
    "tis": Correction(level="token", mode="clip"),
    "icepop": Correction(level="token", mode="mask"),
    "seq-mask-tis": Correction(level="geometric", mode="mask"),
}
KL_ESTIMATORS = {"k1": KLEstimator(in_reward=True), "k2": KLEstimator(in_loss=True), "k3": KLEstimator(in_loss=True)}

Properties = Estimator | PolicyLoss | Correction | KLEstimator
TABLES: dict[type[Properties], dict[str, Any]] = {
    Estimator: ESTIMATORS,
    PolicyLoss: POLICY_LOSSES,
    Correction: CORRECTIONS,
    KLEstimator: KL_ESTIMATORS,
}


def extend(name: str, properties: Properties) -> None:
    """Make `name` a choice of the flag these properties belong to. ValueError when it is taken."""
    kind = type(properties)
    if name in TABLES[kind]:
        raise ValueError(f"{kind.__name__} {name!r} is there already: use another name.")
    TABLES[kind][name] = properties
