"""The notice about runs that are too short to change a model."""

from __future__ import annotations

import pytest
import torch

from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.launch.run_length import FEWEST_STEPS, check_steps
from openrlhf.training.optimizers import make_schedule


def idle_steps(schedule: OptimizerConfig, steps: int) -> int:
    """Count the steps at which the actual schedule has a learning rate of 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = make_schedule(optimizer, schedule, steps)
    idle = 0
    for _ in range(steps):
        idle += rates.get_last_lr()[0] == 0
        optimizer.step()
        rates.step()
    return idle


@pytest.mark.parametrize(
    "scheduler", ["cosine_with_min_lr", "constant", "linear", "constant_with_warmup"]
)
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("steps", [1, 3, 19, 20, 200])
def test_notice_agrees_with_learning_rates_of_the_real_schedule(
    scheduler: str, ratio: float, steps: int
) -> None:
    schedule = OptimizerConfig(lr_scheduler=scheduler, lr_warmup_ratio=ratio)
    idle = idle_steps(schedule, steps)
    found = check_steps(steps, schedule, fix="More rows.")
    assert len(found) == (steps < FEWEST_STEPS)
    for finding in found:
        assert not finding.fails
        assert str(steps) in finding.seen
        assert ("warm-up" in finding.seen) == bool(idle)
        assert finding.fix == "More rows."
