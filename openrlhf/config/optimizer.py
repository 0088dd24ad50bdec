"""Sections of the optimizers and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.config.choices import OPTIMIZERS
from openrlhf.config.flags import Section, Unused, count, option

SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
# Schedules with a minimum learning rate, --min_lr_ratio.
FLOORED_SCHEDULERS = (
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


class AdamConfig(Section):
    """AdamW, also with 8-bit moments."""

    lr: float = option(5e-6, "Peak learning rate.", ge=0)
    betas: tuple[float, float] = option((0.9, 0.95), "Decay rates of the two moments.", ge=0, lt=1)
    eps: float = option(1e-8, "Term added to the denominator for numerical stability.", gt=0)
    weight_decay: float = option(
        0.0,
        "Decoupled weight decay, also of the matrices that Muon trains; biases and norms are "
        "exempt.",
        ge=0,
    )


class MuonConfig(Section):
    """Muon for the matrices of hidden layers; AdamW trains all other parameters."""

    lr: float = option(0.02, "Peak learning rate of the matrices.", ge=0)
    momentum: float = option(0.95, "Momentum.", ge=0, lt=1)
    ns_steps: int = count(5, "Newton-Schulz iterations per step.")
    nesterov: bool = option(True, "Use Nesterov momentum.")


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule of one model."""

    optim: str = option(
        "adam",
        "Optimizer: AdamW, AdamW with 8-bit moments, or Muon.",
        choices=tuple(OPTIMIZERS),
    )
    muon: MuonConfig = MuonConfig()
    adam: AdamConfig = AdamConfig()
    lr_scheduler: str = option("cosine_with_min_lr", "Schedule.", choices=SCHEDULERS)
    lr_warmup_ratio: float = option(0.03, "Fraction of the steps used for warmup.", ge=0, le=1)
    min_lr_ratio: float = option(
        0.1,
        "Minimum learning rate as a fraction of the peak, for schedules that have a minimum.",
        ge=0,
        le=1,
    )
    max_norm: float = option(1.0, "Clip gradients to this norm; 0: no clipping.", ge=0)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        yield from super().unused()
        for name, traits in OPTIMIZERS.items():
            if traits.section and self.optim != name:
                yield Unused([traits.section], f"without --optim {name}")
        if self.lr_scheduler == "constant":
            yield Unused(["lr_warmup_ratio"], "with --lr_scheduler constant")
        if self.lr_scheduler not in FLOORED_SCHEDULERS:
            schedulers = " or ".join(FLOORED_SCHEDULERS)
            yield Unused(["min_lr_ratio"], f"without --lr_scheduler {schedulers}")
