"""A rank of the universal-checkpoint tests, which trains a tiny model for a few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from openrlhf.config.machine import world_size
from openrlhf.config.shared import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.core.batches import TokenRows
from openrlhf.training.gathered import full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.training.window_worker import batch, new_engine

# A large epsilon makes AdamW nearly linear in the gradient, so that weights can be compared as
# tightly as gradients.
OPTIMIZER = OptimizerConfig(
    adam=AdamConfig(lr=1.0, eps=1.0, betas=(0.9, 0.95)),
    lr_scheduler="linear",
    lr_warmup_ratio=0.0,
    max_norm=0.5,
)
TOTAL_STEPS = 8


def train(
    strategy: Strategy, model: str, steps: range, source: Path | None, target: Path
) -> tuple[list[float], list[float]]:
    """Train from the checkpoint `source`, or from scratch, and save to `target`.

    Returns the learning rate and gradient norm of each step.
    """
    engine = new_engine(strategy, model, OPTIMIZER, packing=True, total_steps=TOTAL_STEPS)
    if source:
        engine.load(str(source), "saved")
    rates, norms = [], []
    for step in steps:
        rows = batch(step)
        mine = rows.select(list(range(strategy.dp_rank, rows.num_samples, strategy.dp_size)))

        def loss(micro: TokenRows, totals: Any) -> Any:
            return -engine(micro.tokens, micro.offsets, micro.loss_mask).logprobs.sum() / totals[
                "tokens"
            ], {}

        result = engine.optimize(
            [mine], counts=lambda micro: {"tokens": float(micro.loss_mask.sum())}, loss=loss
        )
        rates.append(result.lr)
        norms.append(result.grad_norm)
    engine.save(str(target), "saved")
    files = [file.stat().st_size for file in (target / "saved").glob("*_states.pt")]
    assert 0.9 < sum(files) / engine.checkpoint_bytes < 1.2, (files, engine.checkpoint_bytes)
    weights = {
        name: t.float().clone() for bucket in full_parameters(engine, 1 << 16) for name, t in bucket
    }
    if strategy.is_main:
        torch.save(weights, target / "weights.pt")
    return rates, norms


def main() -> None:
    """Run all training jobs. Command-line arguments: model folder, then the jobs as JSON.

    A job lists its ZeRO stage, dtype, first and last step, source folder, and target folder.
    """
    model, runs = sys.argv[1], json.loads(sys.argv[2])
    for stage, dtype, first, last, source, target in runs:
        config = DeepSpeedConfig(zero_stage=stage, param_dtype=dtype, use_universal_ckpt=True)
        strategy = Strategy(config, RankLayout.from_flags(config, processes=world_size()), seed=0)
        found = train(
            strategy, model, range(first, last), Path(source) if source else None, Path(target)
        )
        if strategy.is_main:
            Path(target, "found.json").write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
