"""RL configuration sections for the algorithm: advantages, KL, loss, distillation, pretraining
text.
"""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.config import choices
from openrlhf.config.flags import Section, Unused, count, option, switch, unset

# Flags of `AdvantageConfig` that configure a correction.
CORRECTION_DETAILS = ("is_correction_mode", "is_correction_gating", "is_correction_threshold")


class AdvantageConfig(Section):
    """Advantage estimation."""

    estimator: str = option(
        "gae",
        "Advantage estimator. gae: PPO with a critic. reinforce: REINFORCE++. rloo: RLOO. "
        "reinforce_baseline: REINFORCE++-baseline. group_norm: GRPO. dr_grpo: Dr. GRPO. "
        "flash_reinforce: the batch mean as the baseline, for one sample per prompt.",
        choices=choices.ESTIMATORS,
    )
    gamma: float = option(1.0, "Discount per token.", ge=0, le=1)
    lambd: float = option(1.0, "Lambda of GAE.", ge=0, le=1)
    no_std_norm: bool = switch(
        "Center the advantages of a batch without dividing by their standard deviation.",
    )
    is_correction_level: str = option(
        "off",
        "Correct the loss for differences between the engine's and the trainer's probabilities. "
        "token: compare each token with the threshold. seq: the mean over each answer. "
        "seq-product: the product of the answer's ratios.",
        choices=("off", "token", "seq", "seq-product"),
    )
    is_correction_mode: str = option(
        "mask",
        "mask: weight a token by its ratio pi_old / pi_rollout, or by 0 outside the threshold. "
        "clip: clip the ratio to the threshold.",
        choices=("mask", "clip"),
    )
    is_correction_gating: str = option(
        "ratio",
        "What to compare with the threshold: the ratio, or a divergence of the two probabilities "
        "of the sampled token.",
        choices=("ratio", "binary_kl", "tv"),
    )
    is_correction_threshold: tuple[float, float] = option(
        (0.5, 5.0), "Lower and upper bound; a single number is the upper bound.", ge=0, single=0.0
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.traits.per_episode:
            yield Unused(["gamma"], f"with --estimator {self.estimator}")
        if not self.traits.needs_critic:
            yield Unused(["lambd"], "without a critic (--estimator gae)")
        if not self.traits.whiten:
            yield Unused(
                ["no_std_norm"],
                "without an --estimator that whitens advantages, such as gae, reinforce or "
                "reinforce_baseline",
            )
        if not self.corrects:
            yield Unused(CORRECTION_DETAILS, "without --is_correction_level")

    @property
    def traits(self) -> choices.EstimatorTraits:
        """Traits of the selected estimator."""
        return choices.ESTIMATORS[self.estimator]

    @property
    def corrects(self) -> bool:
        """True if the loss is corrected for differences between engine and trainer."""
        return self.is_correction_level != "off"


class KLConfig(Section):
    """KL divergence from the reference."""

    init_coef: float = option(0.01, "KL coefficient; 0: do not load a reference.", ge=0)
    estimator: str = option("k1", "Estimator.", choices=choices.KL_ESTIMATORS)
    use_loss: bool = switch(
        "Add the KL to the loss instead of subtracting it from the rewards.",
    )
    unbiased_gradient: bool = switch(
        "Use the gradient of the KL itself for the KL term in the loss, whatever the estimator.",
        needs="use_loss",
    )
    target: float | None = unset(
        "Adapt the coefficient to keep the KL near this value, in nats per token.", gt=0
    )
    horizon: int = count(
        10000, "Number of samples over which the coefficient adapts.", needs="target"
    )
    stop_update: float | None = unset(
        "Stop updating on a batch when the KL exceeds this value, in nats per token.", gt=0
    )
    stop_run: float | None = unset(
        "Stop the run when the KL exceeds this value, in nats per token.", gt=0
    )

    @property
    def in_reward(self) -> bool:
        """True if the KL is subtracted from the rewards."""
        return self.init_coef > 0 and not self.use_loss

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not self.init_coef:
            yield Unused(["estimator", "use_loss", "unbiased_gradient"], "without --init_coef")


class LossConfig(Section):
    """Aggregation of the policy loss."""

    aggregation: str = option(
        "token",
        "Mean over tokens, mean of per-sequence means, or sum divided by a constant length. The "
        "default with gspo is sequence.",
        choices=("token", "sequence", "constant"),
    )
    mask_truncated: bool = switch("Exclude truncated samples from all losses.")


class DistillConfig(Section):
    """On-policy distillation."""

    teacher: str | None = unset(
        "Folder or Hub name of the teacher, or the name of a server in rollout.remote_engines.",
        holds="model",
    )
    coef: float = option(1.0, "Weight of the distillation term.", ge=0, needs="teacher")


class PtxConfig(Section):
    """Pretraining text mixed into the updates."""

    dataset: str | None = unset("Comma-separated files, folders or Hub names.", holds="dataset")
    probs: str | None = unset("Comma-separated probabilities, one per dataset.", needs="dataset")
    split: str = option(
        "train", "Split of each dataset; files have a single split.", needs="dataset"
    )
    coef: float = option(0.05, "Weight of the loss on this text.", ge=0, needs="dataset")


class AlgoConfig(Section):
    """The algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    kl: KLConfig = KLConfig()
    loss: LossConfig = LossConfig()
    distill: DistillConfig = DistillConfig()
    ptx: PtxConfig = PtxConfig()
    dynamic_filtering_enable: bool = switch(
        "Discard prompts whose mean score is outside the filtering range, and replace them."
    )
    dynamic_filtering_range: tuple[float, float] = option(
        (0.0, 1.0),
        "Range of mean scores to keep; the bounds are exclusive.",
        needs="dynamic_filtering_enable",
    )
