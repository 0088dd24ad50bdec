"""One rank of the split tests of DPO and KTO: two optimizer steps of a tiny model in every layout asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from openrlhf.config.flags import amend
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.config.supervised import DPOConfig, KTOConfig
from openrlhf.data.feedback import PairRow
from openrlhf.data.labelled import LabelledRow
from openrlhf.distributed.engine import TrainEngine
from openrlhf.distributed.strategy import Strategy
from openrlhf.launch.offline import load_models
from openrlhf.observability.metrics import merge_all, values
from openrlhf.trainers.kto import KTOTask
from openrlhf.trainers.preference import PreferenceTask
from openrlhf.trainers.referenced import ReferencedTask
from openrlhf.workers.base import MicroBatchLimits

STEPS, ROWS = 2, 8
FLAGS: dict[str, Any] = {
    "adam.lr": 1.0,
    "adam.eps": 1.0,  # nearly linear in the gradient, so that weights compare as tightly as gradients do
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "max_norm": 0.5,
    "data.max_len": 64,
    "ds.attn_implementation": "sdpa",
}


def words(step: int) -> list[list[int]]:
    """A prompt and two answers for each row, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 9, (3 * ROWS,), generator=generator).tolist()
    return [torch.randint(4, 60, (n,), generator=generator).tolist() for n in lengths]


def pairs(step: int) -> list[PairRow]:
    """The pairs of an optimizer step."""
    drawn = words(step)
    return [
        PairRow(chosen=p + a, rejected=p + b, prompt_length=len(p))
        for p, a, b in zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True)
    ]


def answers(step: int) -> list[LabelledRow]:
    """The labelled answers of an optimizer step."""
    return [
        LabelledRow(
            tokens=row.chosen,
            loss_mask=[False] * row.prompt_length + [True] * (len(row.chosen) - row.prompt_length),
            desirable=number % 3 > 0,
        )
        for number, row in enumerate(pairs(step))
    ]


def task_of(name: str, model: str, reference: str, ds: DeepSpeedConfig) -> ReferencedTask[Any, Any]:
    """The task of a loss: kto, or one of --model.loss_type."""
    common = {**FLAGS, "model.model_name_or_path": model, "ref.model_name_or_path": reference, "ds": ds}
    if name == "kto":
        return KTOTask(amend(KTOConfig(), {**common, "kto.beta": 0.5, "kto.undesirable_weight": 1.5}))
    own = {"model.loss_type": name, "model.label_smoothing": 0.1, "model.nll_loss_coef": 0.2}
    return PreferenceTask(amend(DPOConfig(), {**common, **own}))


def train(strategy: Strategy, task: ReferencedTask[Any, Any], limits: MicroBatchLimits) -> dict[str, Any]:
    """Norms, metrics and final weights."""
    engine: TrainEngine = load_models(task, strategy, STEPS)
    norms, logged = [], []
    for step in range(STEPS):
        rows = answers(step) if isinstance(task, KTOTask) else pairs(step)
        mine = task.of_window(rows[strategy.dp_rank :: strategy.dp_size], strategy)
        result = engine.optimize(
            task.micro_batches(task.collate(mine), limits),
            counts=task.counts,
            loss=lambda micro, totals: task.loss(engine, micro, totals),
            before=lambda micro: task.before(engine, micro),
        )
        norms.append(result.grad_norm)
        logged.append(values(merge_all(strategy.gather(result.metrics))))
    weights = {n: t.float().clone() for bucket in engine.full_parameters(1 << 16) for n, t in bucket}
    return {"norms": norms, "metrics": logged, "weights": weights}


def main() -> None:
    """Arguments: model folder, reference folder, output file, then layouts like `dpo-zero2-micro1-packed`."""
    model, reference, out, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        name, stage, micro, kind = layout.split("-")
        packing = kind == "packed"
        ds = DeepSpeedConfig(
            zero_stage=int(stage[-1]), param_dtype="fp32", packing_samples=packing, attn_implementation="sdpa"
        )
        strategy = Strategy(ds, seed=0)
        limits = MicroBatchLimits(size=int(micro[-1]), packed=packing)
        results[layout] = train(strategy, task_of(name, model, reference, ds), limits)
    if strategy.is_main:
        torch.save(results, Path(out))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
