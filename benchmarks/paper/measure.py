"""Measures every framework's seconds per step in the same way, from the framework's output.

At the end of each step, a framework leaves a mark: a printed line or a written row. The time
between two consecutive marks is the full duration of a step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

PACKAGES = ("torch", "vllm", "transformers", "deepspeed", "ray", "flash-attn", "trl", "verl")
STAMP = re.compile(r"\[(\d+\.\d+)\] (.*)")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The end of a step."""

    time: float  # seconds
    samples: float = 0.0  # number of samples in the step
    tokens: float | None = (
        None  # sampled tokens in the step; None if the framework does not report the number
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The measured steps of one run. In the PPO comparison, a step is 1,024 prompts."""

    seconds: tuple[float, ...]
    mean_s: float
    median_s: float
    samples_per_second: float
    tokens_per_second: float | None
    tokens_per_sample: float | None


def summarize(marks: Sequence[Mark], warm_up: int) -> Summary:
    """Summarize the steps after the first `warm_up`.

    Raises ValueError if no step is left. The first mark only starts the clock, so `warm_up` is at
    least 1.
    """
    if warm_up < 1:
        raise ValueError("warm_up must be at least 1, because the first step includes the startup")
    kept = marks[warm_up - 1 :]
    if len(kept) < 2:
        raise ValueError(f"the run has {len(marks)} steps, which is not more than {warm_up}")
    seconds = []
    for before, after in pairwise(kept):
        seconds.append(after.time - before.time)
    measured, total = kept[1:], sum(seconds)
    samples = sum(mark.samples for mark in measured)
    tokens: float | None = None
    if all(mark.tokens is not None for mark in measured):
        tokens = sum(mark.tokens or 0.0 for mark in measured)
    return Summary(
        seconds=tuple(round(each, 2) for each in seconds),
        mean_s=fmean(seconds),
        median_s=median(seconds),
        samples_per_second=samples / total,
        tokens_per_second=None if tokens is None else tokens / total,
        tokens_per_sample=None if tokens is None or not samples else tokens / samples,
    )


# ---- marks of each framework


def our_marks(metrics: Path) -> list[Mark]:
    """Read the marks of this project from a run's metrics.jsonl."""
    marks = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "rollout/num_samples" in row:
            samples = row["rollout/num_samples"]
            tokens = samples * row["rollout/response_length_mean"]
            marks.append(Mark(time=row["time"], samples=samples, tokens=tokens))
    return marks


def stamped_lines(log: Path) -> list[tuple[float, str]]:
    """Return the lines of a log with their times in seconds."""
    lines = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := STAMP.match(line):
            lines.append((float(found[1]), found[2]))
    return lines


def trl_marks(log: Path, *, samples: int) -> list[Mark]:
    """Read the lines that `gsm8k/trl_grpo.py` prints."""
    marks = []
    for seconds, line in stamped_lines(log):
        if "paper {" in line:
            row = json.loads(line[line.index("{") :])
            marks.append(
                Mark(time=seconds, samples=samples, tokens=samples * row["response_length"])
            )
    return marks


def verl_marks(log: Path, *, samples: int) -> list[Mark]:
    """Read the lines of verl's console logger: `step:1 - name:value - name:value`."""
    marks = []
    for seconds, line in stamped_lines(log):
        if re.search(r"\bstep:\d+ - ", line):
            found = re.search(r"response_length/mean:(?:np\.float\w+\()?([\d.]+)", line)
            tokens = samples * float(found[1]) if found else None
            marks.append(Mark(time=seconds, samples=samples, tokens=tokens))
    return marks


def deepspeed_chat_marks(log: Path, *, samples: int) -> list[Mark]:
    """Read the lines that DeepSpeed-Chat's `main.py` prints after each update.

    DeepSpeed-Chat does not report the length of its responses.
    """
    marks = []
    for seconds, line in stamped_lines(log):
        if re.search(r"Epoch: \d+ \| Step: \d+ \|", line):
            marks.append(Mark(time=seconds, samples=samples))
    return marks


# ---- running a framework


def run(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Run a command and write its output to `log`, with the time of each line.

    After each line, `is_enough` determines whether to end the command early. Raises RuntimeError
    with the end of the log if the command fails or takes too long.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    end, ended = time.monotonic() + timeout_s, False
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            ["timeout", "--kill-after=20", str(timeout_s), *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(f"[{time.time():.2f}] {line}")
            file.flush()
            if not ended and is_enough():
                process.terminate()
                ended = True
    if process.wait() and not ended:
        late = time.monotonic() >= end
        reason = (
            f"took more than {timeout_s:.0f} s" if late else f"exited with {process.returncode}"
        )
        raise RuntimeError(f"{' '.join(command)} {reason}. The end of {log}:\n{tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


# ---- the machine


def output_of(command: Sequence[str]) -> str:
    """Return the output of a command, or an empty string if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions(python: str) -> dict[str, str]:
    """Return the versions of the relevant packages in a Python environment."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "names = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: names[n] for n in sys.argv[1:] if n in names}))"
    )
    found: dict[str, str] = json.loads(output_of([python, "-c", code, *PACKAGES]) or "{}")
    return found


def machine() -> dict[str, object]:
    """Return the date, the commit, and the hardware of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": output_of(["git", "rev-parse", "HEAD"]),
        "changed files": output_of(["git", "status", "--short", "--untracked-files=no"]),
        "gpus": output_of(query).splitlines(),
        "cpus": os.cpu_count(),
        "load before": os.getloadavg()[0],
    }
