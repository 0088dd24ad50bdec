"""Tests that asynchronous training learns as much as synchronous training, even with a long queue.

The runs train GRPO on the demo task with three seeds. To start a single run: `pytest -m verify
tests/verify/test_async_learning.py -k "queue2_corrected and seed1"`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from examples.demo.run import rl_flags
from tests.e2e.commands import column
from tests.pages import flag_sets
from tests.ranks import ROOT
from tests.verify.learning import LearningRun, mean_curve, read_runs, record, sparkline
from tests.verify.results import FOLDER, versions, write_result
from tests.verify.test_learning import PASS_AT_1, batches, supervised, train

pytestmark = pytest.mark.verify
RECORDS = FOLDER / "asynchronous.jsonl"
SEEDS = [1, 2, 3]
BEHIND = "--train.async_enable --train.partial_rollout_enable --train.async_queue_size"
CORRECTED = "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip"
RUNS = {
    "synchronous": "",
    **{f"queue{size}": f"{BEHIND} {size}" for size in (1, 2, 4, 8)},
    **{f"queue{size}_corrected": f"{BEHIND} {size} {CORRECTED}" for size in (1, 2, 4, 8)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async-learning")


@pytest.mark.parametrize("seed", SEEDS, ids="seed{}".format)
@pytest.mark.parametrize("name", RUNS)
def test_run_is_recorded_and_learns_unless_stale_samples_are_uncorrected(
    name: str, seed: int, folder: Path
) -> None:
    task, model = supervised(folder, seed)
    out = folder / f"{name}-{seed}"
    own = [*flag_sets()["group_norm"], *batches(32, 8).split(), *RUNS[name].split()]
    reward = ["--reward.remote_url", ROOT / "tests/verify/digits.py"]
    train("train_ppo_ray", [*rl_flags(task, model, out, seed), *reward, *own])
    before, after = column(out, PASS_AT_1)
    run = LearningRun(
        name=name,
        seed=seed,
        flags=" ".join(own),
        solved=[round(share, 4) for share in column(out, "train/score")],
        pass_at_1=[round(before, 4), round(after, 4)],
        lag=round(fmean(column(out, "rollout/lag_mean") or [0.0]), 2),
        versions=versions(),
    )
    record(run, RECORDS)
    write_page()
    assert after > before or name in ("queue4", "queue8")


def test_corrected_training_with_a_queue_of_two_matches_synchronous_training() -> None:
    """The mean held-out pass@1 over seeds is no lower than the worst synchronous seed's."""
    after = {
        name: [run.pass_at_1[1] for run in read_runs(RECORDS) if run.name == name] for name in RUNS
    }
    assert len(after["synchronous"]) == len(after["queue2_corrected"]) == len(SEEDS)
    assert fmean(after["queue2_corrected"]) >= min(after["synchronous"])


def write_page() -> None:
    """Write docs/results/asynchronous.md, with one row for each kind of recorded run."""
    runs = read_runs(RECORDS)
    rows = []
    for name in RUNS:
        if not (mine := [run for run in runs if run.name == name]):
            continue
        learned = " | ".join(f"{run.pass_at_1[0]:.3f} → {run.pass_at_1[1]:.3f}" for run in mine)
        mean = f"{fmean(run.pass_at_1[1] for run in mine):.3f}"
        rows.append(
            [
                name,
                f"{fmean(run.lag for run in mine):.1f}",
                learned,
                mean,
                sparkline(mean_curve(mine)),
            ]
        )
    write_result(
        "asynchronous",
        "What asynchronous training learns",
        "python -m pytest -m verify tests/verify/test_async_learning.py",
        ["run", "mean age", *(f"seed {seed}" for seed in SEEDS), "mean after", "solved by step"],
        rows,
        "GRPO on the demo task, 32 steps: held-out pass@1 before → after training (400 "
        "problems × 4 samples). `queue4`: `--train.async_queue_size 4` with partial rollouts; "
        f"`corrected`: with `{CORRECTED}`. Age: number of versions between sampling a response and "
        "training on it. All flags and steps are in `asynchronous.jsonl`.",
    )
