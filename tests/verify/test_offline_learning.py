"""DPO, KTO, process reward models and distillation learn a toy set of their own, with three seeds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import column, run, write_rows
from tests.e2e.test_offline_family import flags_of, make_workspace, rows_of
from tests.verify.results import write_result

pytestmark = pytest.mark.verify

SEEDS = (1, 2, 3)
TRAINED, HELD_OUT = 512, 64
# What an evaluation logs of the toy set, what it is called on the page, and where it has to end.
MEASURED: dict[str, tuple[str, str, float]] = {
    "dpo": ("eval/eval_loss", "held-out loss of a pair, 0.693 before the training", 0.2),
    "kto": ("margin", "held-out reward of desirable − undesirable answers", 0.5),
    "prm": ("eval/eval acc", "held-out steps judged rightly", 0.95),
    "kd": ("eval/eval gpt_loss", "held-out loss of the responses, nats per token", 3.5),
}
EXTRA: dict[str, dict[str, Any]] = {"kd": {"kd.coef": 0.5}}


def curve(task: str, folder: Path) -> list[float]:
    """The measured number after each evaluation."""
    name = MEASURED[task][0]
    if name != "margin":
        return column(folder, name)
    good, bad = (column(folder, f"eval/{kind}_reward") for kind in ("chosen", "reject"))
    return [g - b for g, b in zip(good, bad, strict=True)]


@pytest.mark.timeout(1800)
def test_every_task_learns_its_toy_set(tmp_path: Path) -> None:
    workspace, table = make_workspace(tmp_path), []
    for task, (_, what, wanted) in MEASURED.items():
        cells = []
        for seed in SEEDS:
            train = write_rows(tmp_path / f"{task}-{seed}.jsonl", rows_of(task, TRAINED, seed=10 + seed))
            held_out = write_rows(tmp_path / f"{task}-{seed}-eval.jsonl", rows_of(task, HELD_OUT, seed=20 + seed))
            changes = {
                "data.dataset": train,
                "eval.dataset": held_out,
                "eval.steps": 8,
                "train.seed": seed,
                "train.max_epochs": 2,
                "ds.packing_samples": True,
                **EXTRA.get(task, {}),
            }
            folder = tmp_path / f"run-{task}-{seed}"
            run(f"train_{task}", flags_of(task, workspace, folder, **changes))
            first, *_, last = curve(task, folder)
            falls = task in ("dpo", "kd")
            assert last < min(first, wanted) if falls else last > max(first, wanted), (task, seed, first, last)
            cells.append(f"{first:.3f} → {last:.3f}")
        table.append([f"`train_{task}`", what, *cells])
    write_result(
        "offline_learning",
        "Preferences, labels, steps, teachers: toy sets",
        "python -m pytest -m verify tests/verify/test_offline_learning.py",
        ["command", "measured", *(f"seed {seed}" for seed in SEEDS)],
        table,
        f"After 8 optimizer steps → after 64, of 16 rows each, a random model of 60,000 parameters. Each run has its own {TRAINED} training and "
        f"{HELD_OUT} held-out rows: tests/e2e/test_offline_family.py makes them.",
    )
