"""A rank that trains a tiny model with an optimizer in several layouts, and saves the weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.config.learning import RLDeepSpeedConfig, RLLoraConfig
from openrlhf.config.optimizer import AdamConfig, MuonConfig, OptimizerConfig
from openrlhf.core.batches import TokenRows
from openrlhf.models.policy import PolicyModel
from openrlhf.training import drive
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.engine import TrainEngine
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.loading import load_spec
from tests.ranks import ROOT, fork_ranks
from tests.tiny import save_tiny_model
from tests.trainers.offline_job import weights_of
from tests.training.window_worker import batch

STEPS = 3
EMA = 0.5
MUON = MuonConfig(lr=0.02, momentum=0.9)
OPTIMIZER = OptimizerConfig(
    optim="muon",
    muon=MUON,
    # With a large epsilon, an update is nearly linear in the gradient.
    # Weights can therefore be compared as tightly as gradients.
    adam=AdamConfig(lr=1.0, eps=1.0, weight_decay=0.1),
    lr_scheduler="constant",
    lr_warmup_ratio=0.0,
    max_norm=0.0,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: its layout of ranks and the settings of its optimizer."""

    ranks: int = 2
    zero: int = 1
    sp: int = 1
    tp: int = 1
    zpg: int = 1
    model: str = "llama"  # a model kind in `tests.tiny`
    dtype: str = "fp32"
    max_norm: float = 0.0
    offload: bool = False
    nvme: str = "none"  # optimizer, or all to also offload the weights
    param_offload: bool = False  # to CPU memory
    sleep: bool = False
    lora: int = 0  # rank of the adapters
    optim: str = "muon"
    adam: AdamConfig = OPTIMIZER.adam
    steps: int = STEPS
    resume_at: int | None = None  # resume from a checkpoint in a new engine after this step


def run(case: Case, folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights before the first step and after each step, and their average."""
    where = "none"
    if case.nvme == "all":
        where = "nvme"
    elif case.param_offload:
        where = "cpu"
    ds = RLDeepSpeedConfig(
        zero_stage=case.zero,
        param_dtype=case.dtype,
        packing_samples=True,
        attn_implementation="sdpa",
        adam_offload=case.offload,
        nvme_path=None if case.nvme == "none" else str(folder / "drive"),
        param_offload=where,
        enable_sleep=case.sleep,
        zpg=case.zpg,
        ring_attn_size=case.sp,
        tensor_parallel_size=case.tp,
        lora=RLLoraConfig(rank=case.lora, alpha=2 * case.lora) if case.lora else RLLoraConfig(),
    )
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=case.ranks), seed=0)
    engine = new_engine(case, strategy, folder)
    weights = [weights_of(engine)]
    for step in range(case.steps):
        if step == case.resume_at:
            place = folder / "checkpoints"
            if strategy.is_main:
                shutil.rmtree(place, ignore_errors=True)
            strategy.barrier()
            engine.save(str(place), "saved")
            engine = new_engine(case, strategy, folder)
            engine.load(str(place), "saved")
        with engine.awake():
            take_step(engine, strategy, step)
        if case.nvme != "none":
            check_state_on_drive(engine, with_weights=case.nvme == "all")
        weights.append(weights_of(engine))
    with engine.awake(), engine.averaged():
        weights.append(weights_of(engine))
    return weights


def check_state_on_drive(engine: TrainEngine, *, with_weights: bool) -> None:
    """Check that all large tensors of the optimizer, and of the weights if asked, are in files."""
    optimizer = engine.deepspeed.optimizer
    tensors: list[Tensor] = []
    for master in optimizer.fp32_partitioned_groups_flat:
        tensors += [master.data, master.grad]
    for state in optimizer.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    large = [tensor for tensor in tensors if drive.is_large(tensor)]
    assert len(large) >= 4, [tensor.shape for tensor in tensors]
    shards: list[Tensor] = []
    for parameter in engine.module.parameters():
        shard: Any = parameter
        if not shard.ds_persist:
            shards.append(shard.ds_tensor)
    assert all(map(drive.is_on_drive, large)), [drive.is_on_drive(tensor) for tensor in large]
    assert shards
    assert all(drive.is_on_drive(shard) == with_weights for shard in shards)


def new_engine(case: Case, strategy: Strategy, folder: Path) -> TrainEngine:
    """Return an engine for the case's model."""
    spec = load_spec(
        path=str(folder / case.model),
        param_dtype=case.dtype,
        attention="sdpa",
        packing=True,
        lora=strategy.config.lora,
    )
    optimizer = replace(OPTIMIZER, optim=case.optim, adam=case.adam, max_norm=case.max_norm)
    engine = TrainEngine(
        strategy, lambda: PolicyModel.load(spec), optimizer, total_steps=case.steps
    )
    engine.average = WeightAverage(engine.module, strategy, EMA)
    return engine


def take_step(engine: TrainEngine, strategy: Strategy, step: int) -> None:
    """Take an optimizer step over this rank's rows. The gradient is ten times larger in step 0."""
    rows = batch(step)
    mine = rows.select(list(range(strategy.dp_rank, rows.num_rows, strategy.dp_size)))
    factor = 10.0 if step == 0 else 1.0

    def loss(micro: TokenRows, totals: Any) -> tuple[Tensor, dict[str, Any]]:
        scores = engine(micro.tokens, micro.offsets, micro.loss_mask)
        return -factor * scores.logprobs.sum() / totals["tokens"], {}

    def counts(micro: TokenRows) -> dict[str, float]:
        return {"tokens": float(micro.loss_mask.sum())}

    cut = [list(range(i, min(i + 3, mine.num_rows))) for i in range(0, mine.num_rows, 3)]
    engine.optimize(mine.split(cut), counts=counts, loss=loss)


def run_cases(cases: list[Case], folder: Path, out: Path) -> None:
    """Run the cases as one rank, and save the weights of all cases."""
    torch.set_num_threads(1)
    drive.MIN_BYTES = 256  # the models are tiny
    results = {case: run(case, folder) for case in cases}
    if os.environ["RANK"] == "0":
        torch.save(results, out)


def run_all(cases: list[Case], folder: Path) -> dict[Case, list[dict[str, Tensor]]]:
    """Run the cases on their ranks, and return what `run` returns on the main rank."""
    for kind in {case.model for case in cases}:
        save_tiny_model(folder / kind, kind, seed=1)
    torch.save(cases, folder / "cases.pt")
    # The ranks must be forked before any thread is started, hence the separate process.
    command = [
        sys.executable,
        "-m",
        __name__,
        str(folder / "cases.pt"),
        str(folder),
    ]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    results: dict[Case, list[dict[str, Tensor]]] = {}
    for file in folder.glob("results-*.pt"):
        results |= torch.load(file, weights_only=False)
    assert len(results) == len(cases), finished.stdout[-2000:] + finished.stderr[-4000:]
    return results


def main() -> None:
    """Run the cases in a file. Command-line arguments: the file, then the model folder."""
    cases: list[Case] = torch.load(sys.argv[1], weights_only=False)
    folder = Path(sys.argv[2])
    for ranks in sorted({case.ranks for case in cases}):
        # DeepSpeed cannot build an ordinary engine after a tensor-parallel engine.
        members = sorted((case for case in cases if case.ranks == ranks), key=lambda case: case.tp)
        fork_ranks(ranks, run_cases, members, folder, folder / f"results-{ranks}.pt")


if __name__ == "__main__":
    main()
