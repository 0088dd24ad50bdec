"""GRPO on GSM8K with one GPU: measures learning, speed, the gap to the engine, and memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = "examples/real_model/gsm8k.yaml"
LOOK_S = 0.5  # seconds between two measurements of memory
WARM_UP = 3  # number of first steps, which compile kernels and fill caches
ENDS = 5  # number of steps averaged at each end of the curve
SMALL = {  # flags for a rehearsal on a CPU
    "data.max_samples": 4,
    "train.num_episodes": 1,
    "rollout.batch_size": 2,
    "rollout.n_samples_per_prompt": 2,
    "rollout.max_new_tokens": 8,
    "rollout.micro_batch_size": 4,
    "train.batch_size": 4,
    "train.micro_batch_size": 4,
    "eval.steps": 1,
    "ds.param_dtype": "fp32",
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPTS, HELD_OUT = Path("gsm8k/prompts.jsonl"), Path("gsm8k/held_out_prompts.jsonl")


class GpuMemory(threading.Thread):
    """A thread that measures the peak memory use of the first GPU, in GiB (None without a GPU)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_gib: float | None = None
        self._finished = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._finished.wait(LOOK_S):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                return
            used = done.stdout.split()
            if used and used[0].isdigit():
                self.peak_gib = max(self.peak_gib or 0.0, round(int(used[0]) / 1024, 2))

    def stop(self) -> float | None:
        self._finished.set()
        self.join()
        return self.peak_gib


def train(
    *,
    model: str | Path | None,
    data: Path | None,
    environment: Mapping[str, str],
    output: Path,
    seconds: float,
    rehearsal: bool,
) -> dict[str, Any]:
    """Train for at most `seconds`, and return the results of the completed steps.

    In a rehearsal, a missing model is replaced by a tiny model, and missing data by two problems.
    Writes grpo.jsonl (the metrics) and grpo.log to `output`.
    """
    output.mkdir(parents=True, exist_ok=True)
    metrics, log = output / "grpo.jsonl", output / "grpo.log"
    metrics.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gsm8k-") as temporary:
        folder = Path(temporary)
        if rehearsal:
            model, data = stand_ins(folder, model, data)
        if model is None or data is None:
            raise ValueError("the trial has no model or no data: receive all pieces first")
        words = command(model, data, folder, rehearsal=rehearsal)
        plan = memory_plan(words, environment)
        memory = GpuMemory()
        memory.start()
        began = time.time()
        with log.open("w") as file, mirrored(folder / "run/metrics.jsonl", metrics):
            done = subprocess.run(
                ["timeout", "--signal=INT", "--kill-after=20", f"{seconds:.0f}", *words],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
                check=False,
            )
    rows = read_rows(metrics)
    result = summarize(rows, began)
    result["peak_gib"] = memory.stop()
    result["plan"] = plan
    result["status"] = done.returncode
    result["successful"] = bool(result["curve"]) and done.returncode in (0, 124, 130)
    if not result["successful"]:
        result["said"] = log.read_text(errors="replace")[-3000:]
    for name, value in result.items():
        if name not in ("curve", "plan"):
            print(f"{name}: {value}", flush=True)
    return result


def command(model: str | Path, data: Path, folder: Path, *, rehearsal: bool) -> list[str]:
    """Return the command line of the run."""
    flags: dict[str, object] = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": data / PROMPTS,
        "eval.dataset": data / HELD_OUT,
        "run.dir": folder / "run",
        "ckpt.output_dir": folder / "trained",
        "ckpt.path": folder / "checkpoints",
    }
    if rehearsal:
        flags |= SMALL
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", "--config", CONFIG]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def memory_plan(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the memory that `openrlhf plan` predicts for a command line on the current machine.

    Returns an empty string if the installed version has no planner.
    """
    planned = [words[0], "-m", "openrlhf.cli.main", "plan", "ppo"]
    done = subprocess.run(
        [*planned, *words[3:]],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""


@contextmanager
def mirrored(source: Path, target: Path) -> Iterator[None]:
    """Copy a file every second until the block exits, so that a killed call loses no results."""
    finished = threading.Event()

    def copy() -> None:
        while not finished.wait(1):
            if source.exists():
                shutil.copy(source, target)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        if source.exists():
            shutil.copy(source, target)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # a killed run's last line may be incomplete
            break
    return rows


def summarize(rows: Sequence[Mapping[str, Any]], began: float) -> dict[str, Any]:
    """Return the curve and the measurements of a run that started at `began` (in seconds).

    Speeds are medians over all steps except the first few; `tokens_per_second` counts all tokens of
    the batch. The gap is the difference between the engine's and the trainer's log-probabilities,
    in nats.
    """
    steps = [row for row in rows if "train/reward" in row]
    curve = []
    for row in steps:
        curve.append(
            {
                "reward": round(row["train/reward"], 4),
                "score": round(row["train/score"], 4),
                "gap": round(row["train/logprob_gap_mean"], 5),
                "seconds": round(row["timing/step_total"], 2),
                "tokens_per_second": round(row["timing/tokens_per_second"]),
            }
        )
    result: dict[str, Any] = {"steps": len(curve), "curve": curve}
    solved = [row["eval/eval_gsm8k_pass1"] for row in rows if "eval/eval_gsm8k_pass1" in row]
    result["held_out_solved"] = [round(each, 4) for each in solved]
    if steps:
        warm = curve[WARM_UP:] or curve
        result["seconds_to_first_step"] = round(steps[0]["time"] - began, 1)
        result["seconds_per_step"] = median(each["seconds"] for each in warm)
        result["tokens_per_second"] = median(each["tokens_per_second"] for each in warm)
        result["largest_gap"] = max(each["gap"] for each in curve)
        for name in ("reward", "score"):
            first, last = curve[:ENDS], curve[-ENDS:]
            ends = (fmean(each[name] for each in first), fmean(each[name] for each in last))
            result[f"{name}_of_first_and_last_steps"] = [round(each, 4) for each in ends]
    return result


def stand_ins(folder: Path, model: str | Path | None, data: Path | None) -> tuple[str | Path, Path]:
    """Return a model and data with two held-out problems; create whichever is missing."""
    if model is None:
        from tests.tiny import save_tiny_model

        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = save_tiny_model(
            folder / "tiny", chat_template=TEMPLATE, max_position_embeddings=512, **sizes
        )
    small = folder / "data"
    (small / PROMPTS).parent.mkdir(parents=True)
    row = {
        "input": [{"role": "user", "content": "1+1?"}],
        "answer": "#### 2",
        "datasource": "gsm8k",
    }
    for path, count in ((PROMPTS, 4), (HELD_OUT, 2)):
        lines = [json.dumps(row)] * count
        if data is not None:
            lines = (data / path).read_text(encoding="utf-8").splitlines()[:count]
        (small / path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return model, small
