"""A script that runs as one rank of the averaged-weights test.

The rank runs optimizer steps of an offline task, skips one of the steps, and resumes from a
checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.checkpoints.manifest import RunState
from openrlhf.config.flags import amend
from openrlhf.config.machine import world_size
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.launch.offline import load_models
from openrlhf.observability.metrics import Metric
from openrlhf.trainers.supervised import SupervisedTrainer
from openrlhf.training.gathered import exported_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.checkpoints.kept import checkpoints_in
from tests.trainers.offline_job import ADAPTERS, ROWS, rows_of, task_of

BETA, STEPS, SKIPPED = 0.75, 4, 3  # step SKIPPED is skipped because its gradient is NaN


class Drawn:
    """A dataset with the rows of all steps."""

    summary = "drawn"

    def __init__(self, name: str) -> None:
        self.rows = [row for step in range(STEPS) for row in rows_of(name, step)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Watched(SupervisedTrainer[Any, Any]):
    """A trainer that stores the weights after each step and gets a NaN gradient in one step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = [self.weights()]

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the trained weights."""
        return {
            name: tensor.clone()
            for bucket in exported_parameters(self.engine, 1 << 14)
            for name, tensor in bucket
        }

    def update(self, window: Sequence[Any]) -> dict[str, Metric]:
        metrics = super().update(window)
        self.path.append(self.weights())
        return metrics

    def _loss(self, micro: Any, totals: Mapping[str, float]) -> tuple[Tensor, dict[str, Metric]]:
        loss, metrics = super()._loss(micro, totals)
        if loss.requires_grad and self.step == SKIPPED - 1:
            loss = loss * torch.nan
        return loss, metrics


def trainer(case: str, model: str, folder: str, export: str) -> Watched:
    """Return a new trainer for a test case such as `rm-zero3` or `sft-zero2-lora`."""
    name, stage, *adapter = case.split("-")
    ds = DeepSpeedConfig(
        zero_stage=int(stage[-1]),
        param_dtype="fp32",
        packing_samples=True,
        attn_implementation="sdpa",
        lora=ADAPTERS["".join(adapter)],
    )
    flags = {
        "train.enable_ema": True,
        "train.ema_beta": BETA,
        "train.max_epochs": 1,
        "train.batch_size": ROWS,
        "train.micro_batch_size": 3,
        "ckpt.save_steps": 2,
        "ckpt.output_dir": export,
    }
    task = task_of(name, model, model, ds)
    task.config = amend(task.config, flags)
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
    return Watched(
        task,
        load_models(task, strategy, STEPS, checkpoints_in(folder)),
        tokenizer=get_tokenizer(model),
        train_rows=Drawn(name),
        eval_rows=Drawn(name),
        checkpoints=checkpoints_in(folder),
        recorder=None,
        start=RunState(step=0, run_dir=folder),
    )


def main() -> None:
    """Train all cases. Command-line arguments: model folder, output folder, then the cases."""
    model, out, *cases = sys.argv[1:]
    for case in cases:
        folder = f"{out}/{case}"
        whole = trainer(case, model, f"{folder}/checkpoints", f"{folder}/whole")
        whole.fit()
        assert all(
            torch.equal(tensor, whole.path[-1][name]) for name, tensor in whole.weights().items()
        )
        resumed = trainer(case, model, f"{folder}/checkpoints", f"{folder}/resumed")
        checkpoint = resumed.checkpoints.find(2, best=False)
        assert checkpoint
        resumed.resume(checkpoint)
        resumed.fit()
        if whole.strategy.is_main:
            torch.save(whole.path, Path(folder) / "path.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
