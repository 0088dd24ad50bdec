"""One rank of the precision test: an optimizer whose every step is smaller than the spacing of bfloat16 around a weight."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.config.shared import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.engine import TrainEngine
from openrlhf.distributed.strategy import Strategy

STEPS, RATE = 64, 1e-3
# Near 1 the spacing of bfloat16 is 2⁻⁸ = 0.0039 below and 0.0078 above: a step of 0.001 alone rounds to no step.
OPTIMIZER = OptimizerConfig(adam=AdamConfig(lr=RATE), lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=0.0)


class Ones(nn.Module):
    """A weight of ones, whose gradient is one: AdamW lowers it by the learning rate in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.hf = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(self.hf.weight)
        self.config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.hf(inputs)


def train(strategy: Strategy) -> Tensor:
    """The weight after `STEPS` steps."""
    engine = TrainEngine(strategy, Ones, OPTIMIZER, total_steps=STEPS)
    for _ in range(STEPS):
        engine.optimize(
            [torch.ones(1, 8, dtype=torch.bfloat16)],
            counts=lambda _: {"rows": 1.0},
            loss=lambda inputs, totals: (engine(inputs).float().sum() / totals["rows"], {}),
        )
    [(_, weight)] = [pair for bucket in engine.full_parameters(1 << 16) for pair in bucket]
    return weight.float().clone()


def main() -> None:
    """Argument: output file."""
    weights = {}
    for stage in range(4):
        strategy = Strategy(DeepSpeedConfig(zero_stage=stage, param_dtype="bf16"), seed=0)
        weights[stage] = train(strategy)
    if strategy.is_main:
        torch.save(weights, Path(sys.argv[1]))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
