"""Compares synchronous training, asynchronous training and the simulator's predictions.

    python -m benchmarks.latency --median 1 --queue 4 --staleness 16

The environment responds after a random time. The benchmark measures wall-clock seconds per step
with the same model and engine. The simulator uses the measured durations of an update and of a
publication, and the distribution of response times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import workload
from benchmarks.processes import follow
from benchmarks.run import ALONE, ONE_THREAD
from benchmarks.simulate import Workload, asynchronous, synchronous

ROOT = Path(__file__).parent.parent
PROMPTS, SAMPLES, WARM_UP = 16, 4, 4
STEPS, EPOCHS_AHEAD = (
    20,
    4,
)  # number of steps, and of epochs in an asynchronous run, whose short steps vary in duration


def measured(
    folder: Path, data: Path, given: argparse.Namespace, flags: dict[str, Any]
) -> list[dict[str, float]]:
    """Complete a run, and return the metrics of each step after the warmup."""
    common: dict[str, Any] = {
        "actor.model_name_or_path": data / "3M-equal",
        "data.prompt_dataset": data / "prompts.jsonl",
        "data.input_key": "input",
        "data.max_samples": PROMPTS * STEPS,
        "train.num_episodes": EPOCHS_AHEAD if flags else 1,
        "data.max_len": workload.LONGEST_PROMPT["prompts"] + 16,
        "train.agent_func_path": ROOT / "benchmarks/waiting_agent.py",
        "reward.workers": 1,
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.micro_batch_size": 16,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "ds.param_dtype": "fp32",
        "run.dir": folder,
        "ckpt.output_dir": folder / "model",
        "ckpt.path": folder / "checkpoints",
    }
    words = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in (common | flags).items()
    ]
    environment = ONE_THREAD | ALONE | {"OPENRLHF_BENCH_MEDIAN": str(given.median)}
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]
    follow(
        command, folder / "metrics.jsonl", environment=environment, log=folder.with_suffix(".log")
    )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][
        WARM_UP:
    ]


def per_step(rows: list[dict[str, float]]) -> float:
    """Return the wall-clock seconds per step."""
    return (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)


def main() -> None:
    """Run both modes and print seconds per step, the speedup, and the predicted speedup."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--median", type=float, default=1.0, help="median wait for the environment in seconds"
    )
    parser.add_argument("--queue", type=int, default=4)
    parser.add_argument("--staleness", type=int, default=16)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = Path(tempfile.mkdtemp(prefix="latency-"))
    data = folder / "data"
    data.mkdir()
    workload.write(data, "3M")
    ahead = {
        "train.async_enable": True,
        "train.async_queue_size": given.queue,
        "train.max_staleness": given.staleness,
        "train.partial_rollout_enable": True,
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_mode": "clip",
    }
    waiting = measured(folder / "synchronous", data, given, {})
    beside = measured(folder / "asynchronous", data, given, ahead)
    work = Workload(
        prompts=PROMPTS,
        samples=SAMPLES,
        slots=10**6,
        median=given.median,
        sigma=1.0,
        train=median(row["timing/make_experience"] + row["timing/ppo_train"] for row in waiting),
        publish=median(row["timing/broadcast"] for row in waiting),
        steps=2000,
    )
    predicted = (
        synchronous(work).per_step
        / asynchronous(work, given.queue, given.staleness, partial=True).per_step
    )
    gained = per_step(waiting) / per_step(beside)
    print(
        f"synchronous {per_step(waiting):.2f} s, asynchronous {per_step(beside):.2f} s per "
        f"step: {gained:.2f} x"
    )
    print(
        f"the simulator predicts {predicted:.2f} x; measured / predicted {gained / predicted:.2f}"
    )


if __name__ == "__main__":
    main()
