"""Names and traits of estimators, losses, corrections and optimizers, without importing torch.

The algorithms register their functions under these names. Names registered by plug-ins are added to
these tables and become valid choices for the corresponding flags, except for --optim, which accepts
only the optimizers listed here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """Requirements that an advantage estimator places on a run."""

    # True if the estimator compares the samples of a prompt and therefore needs at least two.
    # The estimator then uses one reward per episode and no discount.
    per_group: bool = False
    # True if the estimator compares all samples in the batch (one reward per episode, no discount).
    per_batch: bool = False
    needs_critic: bool = False  # True if the estimator reads V(s)
    whiten: bool = False  # True if advantages are whitened over the batch's action tokens

    @property
    def per_episode(self) -> bool:
        """True if the estimator uses one reward per episode and no discount."""
        return self.per_group or self.per_batch


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Default settings of a policy loss, from its paper. Flags override them."""

    aggregation: str = "token"  # default of --algo.loss.aggregation
    clip: tuple[float, float] | None = None  # default clip range; None means --actor.eps_clip
    # True if a correction changes the ratio to π_θ / π_rollout instead of weighting each token.
    rollout_ratio: bool = False


@dataclass(frozen=True, kw_only=True)
class PreferenceLossTraits:
    """Requirements that a preference loss places on a run."""

    needs_reference: bool = True


@dataclass(frozen=True, kw_only=True)
class KLTraits:
    """The uses of an estimator of KL(π‖π_ref): in the reward, in the loss, or in both.

    The reward needs an unbiased value. The loss needs an expected gradient that points toward the
    reference.
    """

    terms: tuple[str, ...] = ("reward", "loss")


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """Requirements that an optimizer places on a run, and the weights that it treats specially.

    An optimizer without special weights has no `mark`. Weights that are not special are trained
    with AdamW and have two float32 moments.
    """

    section: str = ""  # section of flags that only this optimizer reads
    needs_bitsandbytes: bool = False
    # True if --ds.use_universal_ckpt can convert the optimizer's state.
    has_universal_state: bool = False
    # True if DeepSpeed's AdamW for CPUs replaces the optimizer with --ds.adam_offload.
    has_cpu_version: bool = False
    mark: str = ""  # entry of a parameter group that is true if its weights are special
    only_hidden_matrices: bool = False  # False if all weights except embeddings may be special
    min_special_size: int = 0  # number of elements of the smallest special weight
    # Bytes of the moments per special weight or, without a mark, per weight.
    moment_bytes: float = 8


ESTIMATORS = {
    "gae": EstimatorTraits(needs_critic=True, whiten=True),
    "reinforce": EstimatorTraits(whiten=True),
    "rloo": EstimatorTraits(per_group=True),
    "reinforce_baseline": EstimatorTraits(per_group=True, whiten=True),
    "group_norm": EstimatorTraits(per_group=True),
    "dr_grpo": EstimatorTraits(per_group=True),
    "flash_reinforce": EstimatorTraits(per_batch=True),
}
POLICY_LOSSES = {
    "ppo": LossTraits(),
    "gspo": LossTraits(aggregation="sequence", rollout_ratio=True),
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
OPTIMIZERS = {
    "adam": OptimizerTraits(has_universal_state=True, has_cpu_version=True),
    "adam_8bit": OptimizerTraits(
        needs_bitsandbytes=True,
        mark="is_8bit",
        min_special_size=4096,  # as in bitsandbytes
        # Each of the two moments takes one byte per weight, plus a float32 scale per block of 256
        # weights.
        moment_bytes=2 * (1 + 4 / 256),
    ),
    "muon": OptimizerTraits(
        section="muon", mark="is_muon", only_hidden_matrices=True, moment_bytes=4
    ),
}
# Row layouts: detected (auto), set with the column flags (columns), or a known format.
LAYOUTS = ("auto", "columns", "alpaca", "arena", "chat", "orca", "webgpt")
# Presets of `--algo.advantage.is_correction_type`, which set the correction in earlier releases.
# Each preset has a level and a mode, which may have their old or their current names.
# TIS: Yao et al. 2025, fengyao.notion.site/off-policy-rl
# IcePop: Ling team 2025, ringtech.notion.site/icepop
CORRECTIONS = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("geometric", "mask"),
}
