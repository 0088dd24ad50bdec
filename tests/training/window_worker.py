"""One rank of the window tests: trains a tiny model for two optimizer steps in each layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from openrlhf.config.machine import world_size
from openrlhf.config.optimizer import AdamConfig, OptimizerConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import TokenRows
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.training.engine import TrainEngine
from openrlhf.training.gathered import full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.listening import listening_addresses
from tests.loading import load_spec

STEPS = 2
# A large epsilon makes AdamW nearly linear in the gradient.
# Weights can therefore be compared as tightly as gradients.
OPTIMIZER = OptimizerConfig(
    adam=AdamConfig(lr=1.0, eps=1.0), lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=0.5
)


def batch(step: int) -> TokenRows:
    """Return eight rows of different lengths; all processes get the same rows."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 14, (8,), generator=generator).tolist()
    tokens = [torch.randint(4, 60, (n,), generator=generator).tolist() for n in lengths]
    masks = [(torch.rand(n, generator=generator) < 0.6).tolist() for n in lengths]
    return TokenRows.from_lists(tokens, [[False, *mask[1:]] for mask in masks])


def new_engine(
    strategy: Strategy,
    model: str,
    optimizer: OptimizerConfig,
    *,
    packing: bool,
    total_steps: int,
) -> TrainEngine:
    """Return an engine for training the model in the folder `model`."""
    spec = load_spec(
        path=model, param_dtype=strategy.config.param_dtype, attention="sdpa", packing=packing
    )
    return TrainEngine(
        strategy,
        lambda: PolicyModel(load_causal_lm(spec), packing=packing),
        optimizer,
        total_steps=total_steps,
    )


def train(
    strategy: Strategy,
    model: str,
    *,
    micro: int,
    packing: bool,
    folder: Path,
    poison: int | None = None,
) -> dict[str, Any]:
    """Return a run's gradient norms, its final weights, and the skipped steps in its checkpoint.

    The checkpoint is saved in `folder`. In step `poison`, the loss is NaN on the last rank.
    """
    engine = new_engine(strategy, model, OPTIMIZER, packing=packing, total_steps=STEPS)
    norms, applied = [], []
    for step in range(STEPS):
        rows = batch(step)
        mine = rows.select(list(range(strategy.dp_rank, rows.num_rows, strategy.dp_size)))
        cut = [
            list(range(i, min(i + micro, mine.num_rows))) for i in range(0, mine.num_rows, micro)
        ]
        poisoned = step == poison and strategy.dp_rank == strategy.dp_size - 1

        def loss(micro_batch: TokenRows, totals: Any, poisoned: bool = poisoned) -> Any:
            scores = engine(micro_batch.tokens, micro_batch.offsets, micro_batch.loss_mask)
            value = -scores.logprobs.sum() / totals["tokens"]
            return (value * float("nan") if poisoned else value), {}

        def counts(micro_batch: TokenRows) -> dict[str, float]:
            return {"tokens": float(micro_batch.loss_mask.sum())}

        result = engine.optimize(mine.split(cut), counts=counts, loss=loss)
        norms.append(result.grad_norm)
        applied.append(result.applied)
    training = all(module.training for module in engine.module.modules())
    weights = {
        n: t.float().clone() for bucket in full_parameters(engine, 1 << 16) for n, t in bucket
    }
    engine.save(str(folder), "end")
    engine.nonfinite_steps = -1
    engine.load(str(folder), "end")
    return {
        "norms": norms,
        "applied": applied,
        "weights": weights,
        "training": training,
        "skipped": engine.nonfinite_steps,
    }


def main() -> None:
    """Run all layouts. Command-line arguments: model folder, output file, then the layouts.

    Layouts have names like `zero2-micro1-packed`.
    """
    model, out, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        parts = layout.split("-")
        engine = DeepSpeedConfig(
            zero_stage=int(parts[0].removeprefix("zero")),
            param_dtype="bf16" if "bf16" in parts else "fp32",
        )
        strategy = Strategy(engine, RankLayout.from_flags(engine, processes=world_size()), seed=0)
        assert listening_addresses(int(os.environ["MASTER_PORT"])) == {"127.0.0.1"}
        results[layout] = train(
            strategy,
            model,
            micro=int(parts[1].removeprefix("micro")),
            packing="packed" in parts,
            folder=Path(out).parent / layout,
            poison=0 if "poisoned" in parts else None,
        )
    if strategy.is_main:
        torch.save(results, Path(out))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
