"""The number of optimizer steps of a run, checked at start: too few change nothing."""

import math

from openrlhf.config.shared import OptimizerConfig
from openrlhf.data.findings import Finding, Level

FEWEST_STEPS = 20  # that change a model noticeably with the default learning rates
IDLE_SHARE = 0.1  # of the steps, with a learning rate of 0


def check_steps(total_steps: int, schedule: OptimizerConfig, *, fix: str) -> Finding:
    """Return a warning if a run is too short to change a model: few steps, or a rate of 0 in too
    many of them.
    """
    warms_up = (
        schedule.lr_scheduler != "constant"
        and math.ceil(total_steps * schedule.lr_warmup_ratio) > 0
    )
    idle = 0
    if (
        warms_up and total_steps > 1
    ):  # a single step does not warm up; the first of several begins at 0
        idle = 1
    if total_steps >= FEWEST_STEPS and idle <= IDLE_SHARE * total_steps:
        return Finding(check="steps", level=Level.PASS, seen=f"{total_steps} optimizer steps.")
    seen = f"{total_steps} optimizer step(s) are too few to change a model noticeably."
    if idle:
        seen += " The learning rate of the first is 0 (warm-up)."
    return Finding(check="steps", level=Level.WARNING, seen=seen, fix=fix)
