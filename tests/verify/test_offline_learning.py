"""Tests that every offline method learns its own toy dataset with three seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import column, run, write_rows
from tests.e2e.test_offline_family import flags_of, make_workspace, rows_of
from tests.verify.results import write_result

pytestmark = pytest.mark.verify

SEEDS = (1, 2, 3)
TRAINED, HELD_OUT = 512, 64
PAIR_LOSS = "held-out loss of a pair"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A method, its toy dataset, and the metric that evaluations measure."""

    task: str  # the command
    rows: str  # kind of rows, created by tests/e2e/test_offline_family.py
    metric: str
    what: str  # description of the metric on the page
    wanted: float  # threshold that the metric's final value must reach
    falls: bool = False
    flags: dict[str, Any] = field(default_factory=dict[str, Any])

    def curve(self, folder: Path) -> list[float]:
        """Return the metric's value at each evaluation."""
        if self.metric != "margin":
            return column(folder, self.metric)
        good, bad = (column(folder, f"eval/{kind}_reward") for kind in ("chosen", "reject"))
        return [g - b for g, b in zip(good, bad, strict=True)]

    def arguments(self, workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
        """Return a run's flags.

        SFT uses the same rows as distillation but has no teacher.
        """
        flags = flags_of(self.rows, workspace, folder, **changes, **self.flags)
        return {
            name: value
            for name, value in flags.items()
            if self.task == "kd" or not name.startswith("kd.")
        }


def preference(
    loss: str, metric: str, what: str, wanted: float, *, falls: bool = True, **flags: Any
) -> Subject:
    """Return the subject for one of the `train_dpo` losses."""
    named = {"model.loss_type": loss} | {
        name.replace("__", "."): value for name, value in flags.items()
    }
    return Subject(
        task="dpo", rows="dpo", metric=metric, what=what, wanted=wanted, falls=falls, flags=named
    )


SUBJECTS = {
    "SFT": Subject(
        task="sft", rows="kd", metric="eval/eval gpt_loss", what="held-out loss, nats per token",
        wanted=2.15, falls=True
    ),
    "reward model": Subject(task="rm", rows="dpo", metric="eval/eval_loss", what=PAIR_LOSS,
                            wanted=0.2, falls=True),
    "DPO": preference("dpo", "eval/eval_loss", f"{PAIR_LOSS}, 0.693 before training", 0.2),
    "cDPO, ε 0.1": preference("dpo", "eval/eval_loss", f"{PAIR_LOSS}, at least 0.325", 0.4,
                              model__label_smoothing=0.1),
    "robust, ε 0.1": preference("robust", "eval/eval_loss", PAIR_LOSS, 0.2,
                                model__label_smoothing=0.1),
    "IPO": preference("ipo", "eval/eval_loss", f"{PAIR_LOSS}, 25 before training", 5.0),
    "hinge": preference("hinge", "eval/eval_loss", f"{PAIR_LOSS}, 1 before training", 0.1),
    "SimPO": preference("simpo", "eval/eval_loss", PAIR_LOSS, 0.3, model__beta=2.0),
    "ORPO": preference("orpo", "eval/eval_loss", PAIR_LOSS, 2.0),
    "KTO": Subject(
        task="kto", rows="kto", metric="margin",
        what="held-out reward of desirable − undesirable answers", wanted=0.5
    ),
    "process reward model": Subject(
        task="prm", rows="prm", metric="eval/eval acc", what="held-out steps graded correctly",
        wanted=0.95
    ),
    "distillation": Subject(
        task="kd", rows="kd", metric="eval/eval gpt_loss",
        what="held-out loss of the responses, nats per token",
        wanted=3.5, falls=True, flags={"kd.coef": 0.5},
    ),
}  # fmt: skip


@pytest.mark.timeout(1800)
def test_every_offline_method_learns_its_toy_dataset(tmp_path: Path) -> None:
    workspace, table = make_workspace(tmp_path), []
    for name, subject in SUBJECTS.items():
        cells: list[str] = []
        folder = tmp_path / f"method-{len(table)}"
        folder.mkdir()
        for seed in SEEDS:
            train = write_rows(
                folder / f"{seed}.jsonl", rows_of(subject.rows, TRAINED, seed=10 + seed)
            )
            held_out = write_rows(
                folder / f"{seed}-eval.jsonl", rows_of(subject.rows, HELD_OUT, seed=20 + seed)
            )
            changes = {
                "data.dataset": train,
                "eval.dataset": held_out,
                "eval.steps": 8,
                "train.seed": seed,
                "train.max_epochs": 2,
                "ds.packing_samples": True,
            }
            place = folder / f"run-{seed}"
            run(f"train_{subject.task}", subject.arguments(workspace, place, **changes))
            first, *_, last = subject.curve(place)
            learned = (
                last <= min(first, subject.wanted)
                if subject.falls
                else last >= max(first, subject.wanted)
            )
            assert learned, (name, seed, first, last)
            cells.append(f"{first:.3f} → {last:.3f}")
        table.append([name, f"`train_{subject.task}`", subject.what, *cells])
    write_result(
        "offline_learning",
        "The offline methods: toy sets",
        "python -m pytest -m verify tests/verify/test_offline_learning.py",
        ["method", "command", "measured", *(f"seed {seed}" for seed in SEEDS)],
        table,
        "Values after 8 → after 64 optimizer steps of 16 rows each, starting from a random model "
        f"with 60,000 parameters. Each run has its own {TRAINED} training and {HELD_OUT} held-out "
        "rows, made by tests/e2e/test_offline_family.py.",
    )
