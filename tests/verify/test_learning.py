"""Tests that every estimator, policy loss, aggregation and correction learns.

Each run uses the flags that docs/algorithms.md lists for its method. To start a single run:
`pytest -m verify tests/verify/test_learning.py -k "group_norm and seed1"`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from examples.demo.run import rl_flags, sft_flags
from tests.e2e.commands import column
from tests.pages import flag_sets, write_pages
from tests.ranks import ROOT
from tests.verify.learning import CORRECTIONS, GATES, UNCORRECTED, LearningRun, record
from tests.verify.results import versions

pytestmark = pytest.mark.verify
STEPS = 32
# Three standard errors of held-out pass@1.
# The increase in the fraction solved, from the first to the last steps, has the same error.
LIFT = 0.05
PASS_AT_1 = "eval/eval_sort_pass1"
# Samples are four versions old, and a correction has to compensate for their age.
STALE = "--train.async_enable --train.partial_rollout_enable --train.async_queue_size 4"


def batches(prompts: int, samples: int, *, steps: int = STEPS, optimizer_steps: int = 2) -> str:
    """Return the flags that the task adds to a method's flags.

    The probability ratio is 1 only in the first optimizer step of a batch.
    """
    size = prompts * samples // optimizer_steps
    return (
        f"--data.max_samples {prompts * steps} --rollout.batch_size {prompts} "
        f"--rollout.n_samples_per_prompt {samples} --train.batch_size {size} "
        f"--train.micro_batch_size {size} --rollout.micro_batch_size {size} --eval.steps {steps} "
        "--actor.adam.lr 2e-4"
    )


RUNS = {
    "gae": (
        f"{batches(128, 2)} --critic.adam.lr 1e-3 --critic.freezing_steps 4 "
        "--critic.num_gpus_per_node 1"
    ),
    **dict.fromkeys(("reinforce", "flash_reinforce"), batches(256, 1)),
    "rloo": batches(16, 8, steps=2 * STEPS, optimizer_steps=1),
    **dict.fromkeys(("reinforce_baseline", "group_norm", "dr_grpo"), batches(32, 8)),
    **dict.fromkeys(
        ("clip_higher", "dual_clip", "gspo", "cispo", "sequence", "constant"), batches(32, 8)
    ),
    **dict.fromkeys((UNCORRECTED, *CORRECTIONS, *GATES), f"{batches(32, 8)} {STALE}"),
    "distill": f"{batches(32, 8)} --reward.weights 0",  # the rule is only measured, not rewarded
    "dapo": f"{batches(32, 8)} --reward.overlong_buffer_len 2",
    "muon": batches(32, 8),  # beside group_norm, the same method with AdamW
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


@cache
def supervised(folder: Path, seed: int) -> tuple[Path, Path]:
    """Create the task for a seed, and the SFT model that the task's runs start from."""
    task, sft = folder / f"task{seed}", folder / f"sft{seed}"
    subprocess.run([sys.executable, ROOT / "examples/demo/task.py", task, str(seed)], check=True)
    train("train_sft", sft_flags(task, sft, seed))
    return task, sft / "model"


@cache
def teacher(folder: Path, seed: int) -> Path:
    """Train a better model for the task by using four times as much supervised training."""
    task, _ = supervised(folder, seed)
    train(
        "train_sft", [*sft_flags(task, folder / f"teacher{seed}", seed), "--train.max_epochs", "4"]
    )
    return folder / f"teacher{seed}" / "model"


def train(command: str, flags: list[str | Path]) -> None:
    """Run a command as a user would."""
    subprocess.run(
        [sys.executable, "-m", f"openrlhf.cli.{command}", *map(str, flags)], cwd=ROOT, check=True
    )


@pytest.mark.parametrize("seed", [1, 2, 3], ids="seed{}".format)
@pytest.mark.parametrize("name", RUNS)
def test_training_raises_held_out_pass_at_1(name: str, seed: int, folder: Path) -> None:
    task, model = supervised(folder, seed)
    out = folder / f"{name}-{seed}"
    method, own = flag_sets()[name], RUNS[name].split()
    if name == "distill":
        own += ["--algo.distill.teacher", str(teacher(folder, seed))]
    start = time.monotonic()
    reward = ["--reward.remote_url", ROOT / "tests/verify/digits.py"]
    train("train_ppo_ray", [*method, *rl_flags(task, model, out, seed), *reward, *own])
    before, after = column(out, PASS_AT_1)
    run = LearningRun(
        name=name,
        seed=seed,
        flags=" ".join([*method, *own]),
        solved=[round(share, 4) for share in column(out, "train/score")],
        pass_at_1=[round(before, 4), round(after, 4)],
        lag=round(fmean(column(out, "rollout/lag_mean") or [0.0]), 2),
        seconds=round(time.monotonic() - start, 1),
        versions=versions(),
    )
    record(run)
    write_pages()
    assert set(column(out, "train/nonfinite_steps")) == {0}
    if name == UNCORRECTED:
        return
    if name in (*CORRECTIONS, *GATES):  # a policy learns less from stale samples
        assert after > before
        return
    assert after - before >= LIFT
    if (
        "--algo.dynamic_filtering_enable" not in method
    ):  # the fraction excludes prompts that are always solved
        assert run.last - run.first >= LIFT
