"""Compares a few training steps on several ranks with the same steps in one process.

Losses, gradients and weights are compared. The data is divided among ranks that share neither
sequences nor layers. The ranks are forked from a process that has imported the libraries.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.config.flags import amend
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig
from openrlhf.launch.offline import load_models
from openrlhf.observability.metrics import merge_all, values
from openrlhf.training.layout import RankLayout
from openrlhf.training.optimizers import OPTIMIZERS
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import MicroBatchLimits
from tests.ranks import fork_ranks
from tests.tiny import save_tiny_model
from tests.trainers.offline_job import rows_of, take_step, task_of, weights_of

STEPS = 3
LORA = LoraConfig(rank=4, alpha=8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a task on a model in a layout of ranks."""

    model: str  # a model kind in `tests.tiny`
    task: str = "sft"
    optim: str = "sgd"
    ranks: int = 1
    sp: int = 1
    tp: int = 1
    zero: int = 1
    packed: bool = True
    checkpointing: bool = False
    lora: bool = False

    @property
    def layout(self) -> str:
        """The layout, as written in the table of results."""
        return f"DP{self.ranks // (self.sp * self.tp)} TP{self.tp} SP{self.sp} ZeRO {self.zero}"

    @property
    def settings(self) -> str:
        """All settings other than layout and ZeRO stage, as written in the table of results."""
        words = [self.model, self.task]
        if self.optim == "adam":
            words.append("AdamW")
        if self.lora:
            words.append("LoRA")
        if self.checkpointing:
            words.append("checkpointing")
        if not self.packed:
            words.append("padded")
        return ", ".join(words)

    @property
    def plain(self) -> Case:
        """The same run in one process."""
        return replace(self, ranks=1, sp=1, tp=1, zero=0)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest differences from the run in one process."""

    loss: float
    gradient: float  # relative error of the first step
    weights: float  # error after the last step


def sgd(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return a plain gradient-descent optimizer."""
    return torch.optim.SGD(groups, lr=settings.adam.lr)


def is_equal(errors: Errors | str) -> bool:
    """Return whether a run differs from the run in one process only by rounding."""
    if isinstance(errors, str):
        return False
    return errors.loss <= 2e-6 and errors.gradient <= 1e-5 and errors.weights <= 1e-6


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train as one rank of the case's world, and return losses, gradient norms and weights."""
    ds = DeepSpeedConfig(
        zero_stage=case.zero,
        param_dtype="fp32",
        packing_samples=case.packed,
        attn_implementation="sdpa",
        ring_attn_size=case.sp,
        tensor_parallel_size=case.tp,
        lora=LORA if case.lora else LoraConfig(),
    )
    model = str(folder / case.model)
    other = str(folder / f"{case.model}-other")
    task = task_of(case.task, model, other, ds)
    flags = {
        "optim": case.optim,
        "adam.lr": 0.3 if case.optim == "sgd" else 1e-3,
        "adam.eps": 1e-8,
        "max_norm": 1.0,
        "model.gradient_checkpointing_enable": case.checkpointing,
        "model.gradient_checkpointing_reentrant": False,
    }
    task.config = amend(task.config, flags)
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=case.ranks), seed=0)
    engine = load_models(task, strategy, STEPS, CheckpointManager(task.config.ckpt))
    limits = MicroBatchLimits(size=3, packed=case.packed)
    found: dict[str, Any] = {"losses": [], "norms": [], "weights": [weights_of(engine)]}
    for step in range(STEPS):
        result = take_step(strategy, engine, task, rows_of(case.task, step), limits)
        logged = values(merge_all(strategy.gather(result.metrics)))
        losses = [value for name, value in logged.items() if name.endswith("loss")]
        found["losses"].append(losses)
        found["norms"].append(result.grad_norm)
        found["weights"].append(weights_of(engine))
    return found


def errors_of(found: dict[str, Any], expected: dict[str, Any]) -> Errors:
    """Return the differences between a run and the same run in one process."""
    loss = 0.0
    for mine, theirs in zip(found["losses"], expected["losses"], strict=True):
        for value, other in zip(mine, theirs, strict=True):
            loss = max(loss, abs(value - other))
    before = expected["weights"][0]
    moved = torch.zeros(())
    apart = torch.zeros(())
    for name, weight in expected["weights"][1].items():
        moved += (weight - before[name]).square().sum()
        apart += (weight - found["weights"][1][name]).square().sum()
    last = expected["weights"][-1]
    gaps = [(found["weights"][-1][name] - weight).abs().max() for name, weight in last.items()]
    return Errors(
        loss=loss, gradient=float((apart / moved).sqrt()), weights=float(torch.stack(gaps).max())
    )


def compare(cases: Iterable[Case], folder: Path) -> dict[Case, Errors | str]:
    """Run each case on its ranks and in one process.

    Returns the differences, or the last line of the error message if the case failed.
    """
    cases = list(cases)
    for kind in {case.model for case in cases}:
        save_tiny_model(folder / kind, kind, seed=1)
        save_tiny_model(folder / f"{kind}-other", kind, seed=2)
    expected = run_all({case.plain for case in cases}, folder)
    found = run_all(cases, folder)
    errors: dict[Case, Errors | str] = {}
    for case in cases:
        mine, theirs = found[case], expected[case.plain]
        if isinstance(mine, str):
            errors[case] = mine
        elif isinstance(theirs, str):
            errors[case] = f"one process: {theirs}"
        else:
            errors[case] = errors_of(mine, theirs)
    return errors


def run_all(cases: Iterable[Case], folder: Path) -> dict[Case, dict[str, Any] | str]:
    """Run the cases; cases with the same numbers of ranks share processes."""
    # DeepSpeed cannot build an ordinary engine after a tensor-parallel engine.
    worlds: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        worlds.setdefault((case.ranks, case.tp), []).append(case)
    results: dict[Case, dict[str, Any] | str] = {}
    for (ranks, _), members in worlds.items():
        results |= run_world(ranks, members, folder)
    return results


def run_world(ranks: int, cases: list[Case], folder: Path) -> dict[Case, dict[str, Any] | str]:
    """Fork the ranks, and let them run the cases one after another."""
    out = folder / "results.pt"
    out.unlink(missing_ok=True)
    fork_ranks(ranks, run_cases, cases, folder, out)
    results: dict[Case, dict[str, Any] | str] = dict.fromkeys(cases, "the processes died")
    if out.exists():
        results |= torch.load(out, weights_only=False)
    return results


def run_cases(cases: list[Case], folder: Path, out: Path) -> None:
    """Run the cases as one rank. If a case fails on all ranks, the other cases still run."""
    is_main = os.environ["RANK"] == "0"
    OPTIMIZERS.register("sgd")(sgd)
    results: dict[Case, dict[str, Any] | str] = {}
    for case in cases:
        try:
            results[case] = run(case, folder)
        except Exception as error:
            results[case] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if is_main and os.environ.get("PARITY_TRACE"):
                traceback.print_exc()
        if is_main:
            torch.save(results, out)


SPANNING = (
    Case(model="llama", ranks=2, sp=2),
    Case(model="llama", ranks=2, tp=2, zero=2, packed=False),
    Case(model="llama", task="dpo", ranks=4, sp=2, tp=2, zero=3, lora=True),
    Case(model="llama", task="rm", ranks=4, sp=2, zero=2),
    Case(model="qwen3", task="kd", ranks=2, sp=2, zero=3, checkpointing=True),
    Case(model="gemma3", ranks=4, sp=2, tp=2),
    Case(model="qwen3-moe", ranks=2, sp=2),
    Case(model="qwen3-moe", task="kto", ranks=4, tp=2, zero=2),
)


def main() -> None:
    """Compare the cases in `SPANNING`, and exit with status 1 if one differs."""
    torch.set_num_threads(1)
    compared = compare(SPANNING, Path(sys.argv[1]))
    for case, errors in compared.items():
        print(case.layout, case.settings, errors)
    sys.exit(not all(is_equal(errors) for errors in compared.values()))


if __name__ == "__main__":
    main()
