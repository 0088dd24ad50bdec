"""Helpers that run the commands as a user would.

The helpers start processes from flags and read run folders.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler

from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.start import run_ppo
from openrlhf.observability.run_folder import read_lines
from tests.plausible import implausible
from tests.ranks import ROOT

PLAIN = (sys.executable, "-m")
# Another test in the process may have initialized a process group of one rank.
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

Flags = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The exit status and output of a finished command."""

    status: int
    printed: str
    errors: str


def as_arguments(flags: Flags) -> list[str]:
    """Return flags as command-line arguments.

    True sets a switch, None omits the flag, and a list passes several values.
    """
    arguments: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *map(str, values)]
    return arguments


def places(folder: Path) -> dict[str, Path]:
    """Return the flags that direct all output of a run to `folder`."""
    return {
        "run.dir": folder,
        "ckpt.output_dir": folder / "model",
        "ckpt.path": folder / "checkpoints",
    }


def small_grpo(workspace: Path, folder: Path, *, prompts: int, samples: int) -> dict[str, Any]:
    """Return flags for GRPO with the workspace's `model` and `prompts.jsonl`.

    Each batch makes one optimizer step, and answers have at most eight tokens.
    """
    return {
        "actor.model_name_or_path": workspace / "model",
        "data.prompt_dataset": workspace / "prompts.jsonl",
        "data.max_len": 16,
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": samples,
        "rollout.micro_batch_size": 4,
        "train.batch_size": prompts * samples,
        "train.micro_batch_size": 4,
        "ds.param_dtype": "fp32",
        "algo.advantage.estimator": "group_norm",
        **places(folder),
    }


def small_sft(workspace: Path, folder: Path, *, epochs: int) -> dict[str, Any]:
    """Return flags for SFT with the workspace's `model` and `train.jsonl`, in batches of eight."""
    return {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "train.jsonl",
        "data.input_key": "input",
        "data.output_key": "output",
        "data.max_len": 64,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.max_epochs": epochs,
        "adam.lr": 1e-2,
        "ds.param_dtype": "fp32",
        **places(folder),
    }


def train_here(flags: Flags) -> None:
    """Run `train_ppo_ray` in this process, which may already be connected to Ray."""
    run_ppo(parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray"))


def launch(
    command: str,
    flags: Flags,
    launcher: Sequence[str] = PLAIN,
    *,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `openrlhf.cli.<command>` in its own session, with the virtual environment on PATH.

    `command` may include a verb (`main my_task`). The working directory is `folder`, and
    `variables` are added to the environment.
    """
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | dict(
        variables or {}
    )
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.Popen(
        [*launcher, *f"openrlhf.cli.{command}".split(), *as_arguments(flags)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, timeout: float = 400) -> Finished:
    """Wait for a command, and kill its session after `timeout` seconds."""
    try:
        printed, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
        raise AssertionError(f"not done in {timeout:g} s:\n{printed}\n{errors}") from None
    return Finished(status=process.returncode, printed=printed, errors=errors)


def run(
    command: str,
    flags: Flags,
    *,
    launcher: Sequence[str] = PLAIN,
    status: int = 0,
    timeout: float = 400,
) -> Finished:
    """Run a command; check its exit status, and check that every logged value is plausible."""
    done = finish(launch(command, flags, launcher), timeout=timeout)
    assert done.status == status, f"ended with {done.status}:\n{done.printed}\n{done.errors}"
    if status == 0 and flags.get("run.dir"):
        numbers(Path(flags["run.dir"]))
    return done


def kill_when(
    process: subprocess.Popen[str],
    reached: Callable[[], bool],
    *,
    delay: float = 0.0,
    timeout: float = 400,
) -> None:
    """Send SIGKILL to the main process only, `delay` seconds after `reached` returns true."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert process.poll() is None, f"it exited before the kill:\n{process.communicate()}"
        assert time.monotonic() < deadline, "timed out before the kill condition"
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def steps_logged(folder: Path) -> int:
    """Return the last training step logged in the folder of a finished or active run."""
    return max((row["step"] for row in read_lines(folder / "metrics.jsonl")), default=0)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without timing metrics.

    Also checks that all values are plausible.
    """
    rows = list(read_lines(folder / "metrics.jsonl"))
    assert implausible(rows) == []
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith("timing/")}
        for row in rows
    ]


def column(folder: Path, name: str) -> list[float]:
    """Return all values of a logged metric, in order."""
    return [row[name] for row in numbers(folder) if name in row]


def default_schedule(peak: float, steps: int) -> list[float]:
    """Return the learning rates of a run with `steps` optimizer steps.

    The rates come from the Transformers scheduler, with the settings that the default flags give.
    """
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=math.ceil(0.03 * steps),
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def samples(folder: Path) -> list[dict[str, Any]]:
    """Return the training samples in samples.jsonl, without evaluation samples."""
    return [row for row in read_lines(folder / "samples.jsonl") if not row["evaluation"]]


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl from a command that only evaluates."""
    rows = list(read_lines(folder / "samples.jsonl"))
    assert all(row["evaluation"] for row in rows)
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows to a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
