"""Checks at startup whether a run has enough optimizer steps."""

from openrlhf.checks import Finding
from openrlhf.config.optimizer import OptimizerConfig

FEWEST_STEPS = 20  # with the default learning rates, fewer steps hardly change a model


def check_steps(total_steps: int, schedule: OptimizerConfig, *, fix: str) -> list[Finding]:
    """Return a notice if a run has too few steps to change a model."""
    if total_steps >= FEWEST_STEPS:
        return []
    seen = f"{total_steps} optimizer step(s) are too few to change a model noticeably."
    warms_up = schedule.lr_scheduler != "constant" and schedule.lr_warmup_ratio > 0
    if warms_up and total_steps > 1:  # a run of a single step has no warm-up
        seen += " The learning rate of the first step is 0 (warm-up)."
    return [Finding(seen, fix)]
