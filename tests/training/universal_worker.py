"""Training runs for the universal-checkpoint tests: a few steps of a tiny model.

The ranks are forked from a process that has imported the libraries.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf.config.optimizer import AdamConfig, OptimizerConfig
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig
from openrlhf.core.batches import TokenRows
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.training import drive
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.engine import TrainEngine
from openrlhf.training.gathered import exported_parameters, full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.loading import load_spec
from tests.ranks import fork_ranks
from tests.training.window_worker import batch

# A large epsilon makes AdamW nearly linear in the gradient.
# Weights can therefore be compared as tightly as gradients.
OPTIMIZER = OptimizerConfig(
    adam=AdamConfig(lr=1.0, eps=1.0, betas=(0.9, 0.95)),
    lr_scheduler="linear",
    lr_warmup_ratio=0.0,
    max_norm=0.5,
)
TOTAL_STEPS = 8
BUCKET_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run in one layout of ranks, from scratch or from the checkpoint in `source`."""

    first: int  # number of steps before the run
    last: int  # number of steps after the run
    source: str | None
    target: str
    ranks: int = 1
    zero: int = 2
    dtype: str = "fp32"
    sp: int = 1
    tp: int = 1
    lora: bool = False
    average: bool = False  # average the weights (EMA)
    drive: bool = False  # keep the optimizer state and weights in files
    offload: bool = False  # keep the optimizer state in CPU memory

    @property
    def ds(self) -> DeepSpeedConfig:
        """The DeepSpeed settings."""
        return DeepSpeedConfig(
            zero_stage=self.zero,
            param_dtype=self.dtype,
            packing_samples=True,
            use_universal_ckpt=True,
            adam_offload=self.offload,
            nvme_path=f"{self.target}-drive" if self.drive else None,
            param_offload="nvme" if self.drive else "none",
            ring_attn_size=self.sp,
            tensor_parallel_size=self.tp,
            lora=LoraConfig(rank=4, alpha=8) if self.lora else LoraConfig(),
        )


def new_engine(strategy: Strategy, model: str, job: Job) -> TrainEngine:
    """Return a job's engine."""
    lora = strategy.config.lora
    spec = load_spec(path=model, param_dtype=job.dtype, packing=True, lora=lora, seed=5)
    engine = TrainEngine(
        strategy,
        lambda: PolicyModel(load_causal_lm(spec), packing=True),
        OPTIMIZER,
        total_steps=TOTAL_STEPS,
    )
    if job.average:
        engine.average = WeightAverage(engine.module, strategy, 0.5)
    return engine


def train(strategy: Strategy, model: str, job: Job) -> dict[str, Any]:
    """Run a job and save its checkpoint.

    Returns the learning rates, the gradient norms, and the final and averaged weights.
    """
    engine = new_engine(strategy, model, job)
    if job.source:
        engine.load(job.source, "saved")
    found: dict[str, Any] = {"rates": [], "norms": []}
    for step in range(job.first, job.last):
        rows = batch(step)
        mine = rows.select(list(range(strategy.dp_rank, rows.num_rows, strategy.dp_size)))

        def loss(micro: TokenRows, totals: Any) -> Any:
            return -engine(micro.tokens, micro.offsets, micro.loss_mask).logprobs.sum() / totals[
                "tokens"
            ], {}

        result = engine.optimize(
            [mine], counts=lambda micro: {"tokens": float(micro.loss_mask.sum())}, loss=loss
        )
        found["rates"].append(result.lr)
        found["norms"].append(result.grad_norm)
    engine.save(job.target, "saved")
    files = [file.stat().st_size for file in Path(job.target, "saved").glob("*_states.pt")]
    if job.tp == 1 and job.ranks <= 2 and not job.lora:
        assert 0.9 < sum(files) / engine.checkpoint_bytes < 1.2, (files, engine.checkpoint_bytes)
    found["weights"] = copied(full_parameters(engine, BUCKET_BYTES))
    if job.average:
        with engine.averaged():
            found["average"] = copied(exported_parameters(engine, BUCKET_BYTES))
    return found


def copied(buckets: Any) -> dict[str, torch.Tensor]:
    """Return float32 copies of gathered weights. Collective."""
    return {name: tensor.float().clone() for bucket in buckets for name, tensor in bucket}


def run(jobs: list[Job], model: str) -> None:
    """Run the jobs as one rank."""
    for job in jobs:
        layout = RankLayout.from_flags(job.ds, processes=job.ranks)
        strategy = Strategy(job.ds, layout, seed=0)
        found = train(strategy, model, job)
        if strategy.is_main:
            torch.save(found, Path(job.target, "found.pt"))
    torch.distributed.barrier()


def main() -> None:
    """Run lists of jobs, one list after another.

    Command-line arguments: the model folder, then the lists as JSON. The jobs in a list use the
    same ranks.
    """
    torch.set_num_threads(1)
    drive.MIN_BYTES = 256  # the models are tiny
    for fields in json.loads(sys.argv[2]):
        jobs = [Job(**job) for job in fields]
        fork_ranks(jobs[0].ranks, run, jobs, sys.argv[1])


if __name__ == "__main__":
    main()
