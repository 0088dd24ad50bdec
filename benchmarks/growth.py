"""Shows how the private memory of each process of a GRPO run grows over the steps.

`python -m benchmarks.growth --steps 240` trains a model with 20,000 parameters, with flags that
make steps short, and prints the private memory (USS) of each process in MiB at some of the steps.
If a process retains something from every step, its memory keeps growing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import trained
from openrlhf.units import MIB
from tests.tiny import HEADS, save_tiny_model

ROOT = Path(__file__).parent.parent
PROMPTS_PER_STEP = 2
# Names of the processes, keyed by a part of their command line.
ROLES = {
    "gcs_server": "Ray's control store",
    "raylet/raylet": "raylet",
    "ray::RolloutEngine": "engine",
    "ray::WorkerHost": "training process",
    "dashboard": "Ray's dashboard",
    "log_monitor": "Ray's log monitor",
    "runtime_env": "Ray's environment agent",
}


def command(folder: Path, steps: int) -> list[str]:
    """Write a model and prompts to `folder`, and return the run's command."""
    sizes: dict[str, Any] = dict(HEADS)
    model = save_tiny_model(folder / "model", "qwen2-tied", **sizes)
    draw = random.Random(0)
    lines: list[str] = []
    for _ in range(steps * PROMPTS_PER_STEP):
        lines.append(json.dumps({"input": f"{draw.randrange(100)}+{draw.randrange(100)}="}))
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    flags = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.input_key": "input",
        "data.max_len": 32,
        "reward.remote_url": ROOT / "benchmarks/reward.py",
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": PROMPTS_PER_STEP,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": PROMPTS_PER_STEP * 4,
        "train.micro_batch_size": 8,
        "algo.advantage.estimator": "group_norm",
        "actor.adam.lr": 1e-6,
        "ds.param_dtype": "fp32",
        "run.dir": folder / "run",
        "ckpt.output_dir": folder / "trained",
        "ckpt.path": folder / "checkpoints",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]


def private_memory(root: int) -> dict[str, float]:
    """Return the private memory in MiB of a process and its descendants, keyed by name."""
    sizes: dict[str, float] = {}
    parent = psutil.Process(root)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = " ".join([process.name(), *process.cmdline()])
            name = "command" if process == parent else "other"
            for part, role in ROLES.items():
                if part in line and process != parent:
                    name = role
                    break
            size = process.memory_full_info().uss / MIB
            sizes[name] = sizes.get(name, 0.0) + size
    return sizes


def follow(words: list[str], rows: Path, log: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Run the command, and yield the number of finished steps and the memory after each step.

    Raises RuntimeError if the command fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    with log.open("w") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            last = 0
            while process.poll() is None:
                steps = trained(rows)
                if steps > last:
                    last = steps
                    yield steps, private_memory(process.pid)
                time.sleep(0.05)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"The run exited with {process.returncode}: see {log}.")


def main() -> None:
    """Run the benchmark, and print a row for each step in `--shown`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--shown", type=int, nargs="+", default=[20, 60, 100, 150, 200, 235])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="growth-"))
    shown = sorted(options.shown)
    words = command(folder, options.steps)
    for steps, sizes in follow(words, folder / "run/metrics.jsonl", folder / "log"):
        if shown and steps >= shown[0]:
            while shown and steps >= shown[0]:
                del shown[0]
            cells = [f"{name} {size:.1f}" for name, size in sorted(sizes.items())]
            print(f"step {steps}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
