"""One rank of the scalar model's ZeRO test: scores, trains, exports, and scores again.

The job runs at ZeRO stages 2 and 3.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from openrlhf.config.machine import world_size
from openrlhf.config.optimizer import AdamConfig, OptimizerConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.models.scalar import ScalarModel, last_token_scores, load_scalar
from openrlhf.training.engine import TrainEngine
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import FrozenModel, Strategy
from openrlhf.workers.base import export_trained
from tests.loading import load_spec
from tests.models.test_scalar_model import batch
from tests.tiny import character_tokenizer

# A large epsilon makes AdamW nearly linear in the gradient.
# Weights can therefore be compared as tightly as gradients.
OPTIMIZER = OptimizerConfig(
    adam=AdamConfig(lr=0.1, eps=1.0), lr_scheduler="constant", lr_warmup_ratio=0.0
)


def run(stage: int, path: str, out: str) -> dict[str, Any]:
    """Train the model to raise the rewards of a batch. Every rank has the same rows."""
    ds = DeepSpeedConfig(zero_stage=stage, param_dtype="fp32")
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
    spec = load_spec(path=path, param_dtype="fp32", attention="sdpa", packing=True)
    frozen = FrozenModel(strategy, lambda: load_scalar(spec, seed=5))
    engine = TrainEngine(strategy, lambda: load_scalar(spec, seed=5), OPTIMIZER, total_steps=3)
    tokens, offsets = batch()

    def values(model: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens, offsets).values.clone()

    def loss(_: None, totals: Any) -> tuple[Tensor, dict[str, Any]]:
        return -last_token_scores(engine(tokens, offsets).values, offsets).sum() / totals[
            "rows"
        ], {}

    before, frozen_scores = values(engine), values(frozen)
    for _ in range(3):
        assert engine.optimize([None], counts=lambda _: {"rows": 4.0}, loss=loss).applied
    assert isinstance(engine.module, ScalarModel)
    # `export_trained` loads the export again and compares its weights and values with the engine's.
    export_trained(engine, character_tokenizer(), out, bucket_bytes=1 << 14, masters=False)
    return {"before": before, "frozen": frozen_scores, "after": values(engine), "export": out}


def main() -> None:
    """Run every model. Arguments: a file for the results, followed by model folders."""
    out, *paths = sys.argv[1:]
    results = {
        (path, stage): run(stage, path, f"{out}.{number}.zero{stage}")
        for number, path in enumerate(paths)
        for stage in (2, 3)
    }
    if torch.distributed.get_rank() == 0:
        torch.save(results, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
