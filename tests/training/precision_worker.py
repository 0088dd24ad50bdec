"""One rank of the tests for master weights and for steps smaller than bfloat16's spacing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from openrlhf.config.machine import world_size
from openrlhf.config.optimizer import AdamConfig, OptimizerConfig
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scalar import load_scalar
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.engine import TrainEngine
from openrlhf.training.gathered import exported_parameters, full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.masters import whole_master
from openrlhf.training.strategy import Strategy
from tests.loading import load_spec

STEPS, RATE, BETA = 64, 1e-3, 0.75
CHOSEN, REJECTED, DPO_STEPS, DPO_RATE, DPO_BETA = [5, 9, 20, 7], [5, 9, 31, 40, 12], 6, 1e-5, 40.0
# The spacing of bfloat16 is 0.0039 (2⁻⁸) just below 1 and 0.0078 just above 1.
# A single step of 0.001 would therefore be rounded away.
OPTIMIZER = OptimizerConfig(
    adam=AdamConfig(lr=RATE), lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=0.0
)


class Ones(nn.Module):
    """A model whose weight is all ones and whose gradient is always one.

    AdamW decreases the weight by the learning rate in each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hf = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(self.hf.weight)
        self.config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.hf(inputs)


def train(strategy: Strategy) -> Tensor:
    """Return the weight after `STEPS` steps."""
    engine = TrainEngine(strategy, Ones, OPTIMIZER, total_steps=STEPS)
    for _ in range(STEPS):
        engine.optimize(
            [torch.ones(1, 8, dtype=torch.bfloat16)],
            counts=lambda _: {"rows": 1.0},
            loss=lambda inputs, totals: (engine(inputs).float().sum() / totals["rows"], {}),
        )
    [(_, weight)] = [pair for bucket in full_parameters(engine, 1 << 16) for pair in bucket]
    return weight.float().clone()


def load(path: str, kind: str, param_dtype: str) -> PolicyModel | Any:
    """Load the model for a test case: a policy, a policy with adapters, or a scalar model.

    The scalar model has a new head.
    """
    rank = 4 if kind == "adapters" else 0
    spec = load_spec(path, param_dtype=param_dtype, lora=LoraConfig(rank=rank), seed=7)
    return load_scalar(spec, seed=7) if kind == "scalar" else PolicyModel.load(spec)


def masters_of(strategy: Strategy, path: str, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a new engine's master weights and rounded weights, keyed by name."""
    engine = TrainEngine(strategy, lambda: load(path, kind, "bf16"), OPTIMIZER, total_steps=STEPS)
    parameters = dict(engine.hf.named_parameters())
    return {
        name: (whole_master(parameters[name]).cpu().clone(), rounded.cpu().clone())
        for bucket in exported_parameters(engine, 1 << 16)
        for name, rounded in bucket
    }


def masters_in(engine: TrainEngine) -> dict[str, Tensor]:
    """Return copies of the master weights, keyed by name."""
    buckets = exported_parameters(engine, 1 << 16, masters=True)
    return {name: tensor.cpu().clone() for bucket in buckets for name, tensor in bucket}


def averaged(strategy: Strategy, path: str) -> dict[str, Any]:
    """Return the master weights before and after each of two steps, and the weights of an export.

    The export contains the EMA's master weights and rounded weights.
    """
    optimizer = replace(OPTIMIZER, adam=AdamConfig(lr=1e-5))
    engine = TrainEngine(
        strategy, lambda: load(path, "policy", "bf16"), optimizer, total_steps=STEPS
    )
    engine.average = WeightAverage(engine.module, strategy, BETA)
    tokens, offsets = torch.arange(4, 20), torch.tensor([0, 9, 16])
    course, changed = [masters_in(engine)], []
    for _ in range(2):
        result = engine.optimize(
            [tokens],
            counts=lambda _: {"rows": 1.0},
            loss=lambda rows, totals: (
                -engine(rows, offsets, rows > 0).logprobs.sum() / totals["rows"],
                {},
            ),
        )
        course.append(masters_in(engine))
        changed.append(result.changed)
    weights = {n: t.clone() for bucket in exported_parameters(engine, 1 << 16) for n, t in bucket}
    with engine.averaged():
        masters = masters_in(engine)
        rounded = {
            n: t.cpu().clone() for bucket in exported_parameters(engine, 1 << 16) for n, t in bucket
        }
    after = {n: t.clone() for bucket in exported_parameters(engine, 1 << 16) for n, t in bucket}
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())
    engine.average.load(path, "without-average")
    return {
        "course": course,
        "changed": changed,
        "masters": masters,
        "rounded": rounded,
        "after": masters_in(engine),
        "restarted": engine.average.whole_weights,
    }


def preferred(strategy: Strategy, path: str) -> list[float]:
    """Return a pair's DPO loss before each of `DPO_STEPS` steps. All ranks have the same pair."""
    optimizer = OptimizerConfig(adam=AdamConfig(lr=DPO_RATE), lr_scheduler="constant")
    engine = TrainEngine(
        strategy, lambda: load(path, "policy", "bf16"), optimizer, total_steps=DPO_STEPS
    )
    tokens, offsets = (
        torch.tensor([*CHOSEN, *REJECTED]),
        torch.tensor([0, len(CHOSEN), len(CHOSEN) + len(REJECTED)]),
    )

    def margin() -> Tensor:
        logprobs = engine(tokens, offsets, tokens > 0).logprobs
        return logprobs[: len(CHOSEN)].sum() - logprobs[len(CHOSEN) :].sum()

    with torch.no_grad():
        reference = margin()
    losses: list[float] = []

    def loss(_: None, totals: Any) -> tuple[Tensor, dict[str, Any]]:
        each = -logsigmoid(DPO_BETA * (margin() - reference))
        losses.append(float(each.detach()))
        return each / totals["rows"], {}

    for _ in range(DPO_STEPS):
        engine.optimize([None], counts=lambda _: {"rows": 1.0}, loss=loss)
    return losses


def main() -> None:
    """Run all cases. Command-line arguments: output file, then the cases.

    A case is written as `stage,offload,kind,model folder`.
    """
    out, *cases = sys.argv[1:]
    weights: dict[int, Tensor] = {}
    masters: dict[str, Any] = {}
    for stage in range(4):
        ds = DeepSpeedConfig(zero_stage=stage, param_dtype="bf16")
        strategy = Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
        weights[stage] = train(strategy)
    for case in cases:
        stage, offload, kind, path = case.split(",")
        ds = DeepSpeedConfig(
            zero_stage=int(stage), param_dtype="bf16", adam_offload=offload == "offload"
        )
        strategy = Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
        if kind == "averaged":
            masters[case] = averaged(strategy, path)
        elif kind == "preferred":
            masters[case] = preferred(strategy, path)
        else:
            masters[case] = masters_of(strategy, path, kind)
    if strategy.is_main:
        torch.save({"weights": weights, "masters": masters}, Path(out))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
