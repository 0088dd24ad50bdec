"""Checks at startup whether a run has enough optimizer steps."""

import math

from openrlhf.checks import Finding
from openrlhf.config.optimizer import OptimizerConfig

FEWEST_STEPS = 20  # with the default learning rates, fewer steps hardly change a model
IDLE_SHARE = 0.1  # maximum fraction of steps with a learning rate of 0


def check_steps(total_steps: int, schedule: OptimizerConfig, *, fix: str) -> list[Finding]:
    """Return a notice if a run is too short to change a model.

    A run is too short if it has few steps, or if the learning rate is 0 for too many of them.
    """
    warmup_steps = 0
    if schedule.lr_scheduler != "constant":
        warmup_steps = math.ceil(total_steps * schedule.lr_warmup_ratio)
    idle = 0
    if warmup_steps > 0 and total_steps > 1:  # a run of a single step has no warm-up
        idle = 1  # the first step
    if total_steps >= FEWEST_STEPS and idle <= IDLE_SHARE * total_steps:
        return []
    seen = f"{total_steps} optimizer step(s) are too few to change a model noticeably."
    if idle:
        seen += " The learning rate of the first step is 0 (warm-up)."
    return [Finding(seen, fix)]
