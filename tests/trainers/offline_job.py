"""A script for one rank of the tests that split an offline task's accumulation window.

The rank runs two optimizer steps of a tiny model in each given layout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from openrlhf.algorithms import tensors
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.config.flags import amend
from openrlhf.config.machine import world_size
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    RMDeepSpeedConfig,
    SFTConfig,
)
from openrlhf.data.feedback import LabelledRow, PairRow
from openrlhf.data.sft import SFTRow
from openrlhf.data.steps import StepRow
from openrlhf.launch.offline import load_models
from openrlhf.observability.metrics import merge_all, values
from openrlhf.trainers.distill import DistillationTask
from openrlhf.trainers.kto import KTOTask
from openrlhf.trainers.preference import PreferenceTask
from openrlhf.trainers.process_reward import ProcessRewardTask
from openrlhf.trainers.reward import RewardTask
from openrlhf.trainers.sft import SFTTask
from openrlhf.trainers.tasks import OfflineTask
from openrlhf.training.engine import StepResult, TrainEngine
from openrlhf.training.gathered import full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import MicroBatchLimits
from tests.tiny import SIZES

STEPS, ROWS = 2, 8
REWARD_TOKENS = (11, 12)
SHORT_CHUNK = 2 * SIZES["vocab_size"]  # logits of two tokens
ADAPTERS = {
    "": LoraConfig(),
    "lora": LoraConfig(rank=4, alpha=8, rslora=True),
    "qlora": LoraConfig(rank=4, alpha=8),
    "dora": LoraConfig(rank=4, alpha=8, dora=True, target_modules=("q_proj", "down_proj")),
    "head": LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "lm_head")),
    "head_alone": LoraConfig(rank=4, alpha=8, target_modules=("lm_head",)),
}
FLAGS: dict[str, Any] = {
    "adam.lr": 1.0,
    # With a large epsilon, an update is nearly linear in the gradient.
    # Weights can therefore be compared as tightly as gradients.
    "adam.eps": 1.0,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "max_norm": 0.5,
    "data.max_len": 64,
    "ds.attn_implementation": "sdpa",
}


def words(step: int) -> list[list[int]]:
    """Return a prompt and two answers for each row; all processes get the same texts."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 9, (3 * ROWS,), generator=generator).tolist()
    return [torch.randint(4, 60, (n,), generator=generator).tolist() for n in lengths]


def pairs(step: int) -> list[PairRow]:
    """Return the preference pairs for an optimizer step."""
    drawn = words(step)
    return [
        PairRow(chosen=p + a, rejected=p + b, prompt_length=len(p))
        for p, a, b in zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True)
    ]


def answers(step: int) -> list[LabelledRow]:
    """Return the labeled answers for an optimizer step."""
    return [
        LabelledRow(
            tokens=row.chosen,
            loss_mask=[False] * row.prompt_length + [True] * (len(row.chosen) - row.prompt_length),
            desirable=number % 3 > 0,
        )
        for number, row in enumerate(pairs(step))
    ]


def responses(step: int) -> list[SFTRow]:
    """Return the texts for an optimizer step, with the response tokens as targets."""
    return [SFTRow(tokens=row.tokens, loss_mask=row.loss_mask) for row in answers(step)]


def solutions(step: int, kind: str) -> list[StepRow]:
    """Return the texts for an optimizer step, with labels for up to three reasoning steps each.

    The labels are numbers or tokens, depending on `kind`.
    """
    generator = torch.Generator().manual_seed(100 + step)
    rows: list[StepRow] = []
    for row in pairs(step):
        places = sorted(torch.randperm(len(row.chosen), generator=generator)[:3].tolist())
        drawn = torch.rand(len(places), generator=generator)
        labels = (
            drawn.tolist()
            if kind == "soft"
            else [float(REWARD_TOKENS[int(x < 0.6)]) for x in drawn]
        )
        rows.append(StepRow(tokens=row.chosen, places=places, labels=labels))
    return rows


def task_of(name: str, model: str, other: str, ds: DeepSpeedConfig) -> OfflineTask[Any, Any, Any]:
    """Return the task for a name such as `kd_top`, whose second part selects a task variant."""
    kind, _, choice = name.partition("_")
    common = {**FLAGS, "model.model_name_or_path": model, "ds": ds}
    reference = None if ds.lora.rank else other
    match kind:
        case "sft":
            return SFTTask(amend(SFTConfig(), common))
        case "rm":
            return RewardTask(amend(RMConfig(), common | {"ds": RMDeepSpeedConfig(**vars(ds))}))
        case "kto":
            own = {
                "ref.model_name_or_path": reference,
                "kto.beta": 0.5,
                "kto.undesirable_weight": 1.5,
            }
            return KTOTask(amend(KTOConfig(), common | own))
        case "kd":
            own = {"kd.teacher_model": other, "kd.top_k": 5 if choice == "top" else None}
            return DistillationTask(amend(KDConfig(), common | own))
        case "prm":
            task = ProcessRewardTask(amend(PRMConfig(), common))
            task.soft, task.reward_tokens = (
                choice == "soft",
                () if choice == "vocabulary" else REWARD_TOKENS,
            )
            return task
        case _:
            own = {
                "model.loss_type": name,
                "model.label_smoothing": 0.1,
                "model.nll_loss_coef": 0.2,
            }
            return PreferenceTask(
                amend(DPOConfig(), {**common, **own, "ref.model_name_or_path": reference})
            )


def rows_of(name: str, step: int) -> list[Any]:
    """Return a task's rows for an optimizer step."""
    kind, _, choice = name.partition("_")
    if kind == "prm":
        return solutions(step, choice)
    return {"kto": answers, "kd": responses, "sft": responses}.get(kind, pairs)(step)


def take_step(
    strategy: Strategy,
    engine: TrainEngine,
    task: OfflineTask[Any, Any, Any],
    rows: list[Any],
    limits: MicroBatchLimits,
    *,
    uneven: bool = False,
) -> StepResult:
    """Take an optimizer step over this rank's part of the rows. Collective.

    With `uneven`, the last rank has one row, and the first rank has all other rows.
    """
    part = rows[strategy.dp_rank :: strategy.dp_size]
    if uneven and strategy.dp_size > 1:
        part = rows[1:] if strategy.is_main else rows[:1]
    mine = task.of_window(part, strategy)
    return engine.optimize(
        task.micro_batches(task.collate(mine), limits),
        counts=task.counts,
        loss=lambda micro, totals: task.loss(engine, micro, totals),
        before=lambda micro: task.before(engine, micro),
    )


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return copies of the plain model's weights in float32. Collective."""
    weights: dict[str, torch.Tensor] = {}
    for bucket in full_parameters(engine, 1 << 16):
        for name, tensor in bucket:
            weights[name] = tensor.float().clone()
    return weights


def train(
    strategy: Strategy,
    name: str,
    task: OfflineTask[Any, Any, Any],
    limits: MicroBatchLimits,
    *,
    uneven: bool,
) -> dict[str, Any]:
    """Train a model and return its gradient norms, metrics and final weights."""
    engine: TrainEngine = load_models(task, strategy, STEPS, CheckpointManager(task.config.ckpt))
    norms, logged = [], []
    for step in range(STEPS):
        result = take_step(strategy, engine, task, rows_of(name, step), limits, uneven=uneven)
        norms.append(result.grad_norm)
        logged.append(values(merge_all(strategy.gather(result.metrics))))
    return {"norms": norms, "metrics": logged, "weights": weights_of(engine)}


def main() -> None:
    """Train in every layout given by a name such as `dpo-zero2-micro1-packed`.

    In a layout with `uneven`, the ranks have very different numbers of rows, and chunks of logits
    are short, so that the ranks compute different numbers of chunks.

    The arguments are the model folder, the folder of the reference or teacher, the output file, and
    the layouts.
    """
    model, other, out, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        name, stage, micro, kind, *further = layout.split("-")
        packing = kind == "packed"
        adapter = "".join(word for word in further if word in ADAPTERS)
        shared = {word[:2]: int(word[2:]) for word in further if word[:2] in ("sp", "tp")}
        ds = DeepSpeedConfig(
            zero_stage=int(stage[-1]),
            param_dtype="bf16" if adapter == "qlora" else "fp32",
            load_in_4bit=adapter == "qlora",
            packing_samples=packing,
            attn_implementation="sdpa",
            lora=ADAPTERS[adapter],
            ring_attn_size=shared.get("sp", 1),
            tensor_parallel_size=shared.get("tp", 1),
        )
        strategy = Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
        limits = MicroBatchLimits(size=int(micro[-1]), packed=packing)
        task = task_of(name, model, other, ds)
        uneven = "uneven" in further
        chunk_logits = SHORT_CHUNK if uneven else tensors.CHUNK_LOGITS
        with patch.object(tensors, "CHUNK_LOGITS", chunk_logits):
            results[layout] = train(strategy, name, task, limits, uneven=uneven)
    if strategy.is_main:
        torch.save(results, Path(out))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
