"""End-to-end tests in which processes of a run are killed during training.

The run continues, and its metrics match those of an uninterrupted run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.checkpoints.manager import RESUME_HINT
from openrlhf.training.devices import free_port
from tests.e2e.commands import (
    PLAIN,
    column,
    finish,
    launch,
    numbers,
    places,
    run,
    samples,
    small_grpo,
    steps_logged,
    write_rows,
)
from tests.e2e.nodes import end, environment, start_node
from tests.e2e.processes import descendants, survivors
from tests.tiny import HEADS, save_tiny_model

REWARDS = Path(__file__).parent / "reward_files"
PROMPTS, BATCH, SAMPLES = 24, 4, 4
STEPS = PROMPTS // BATCH


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    save_tiny_model(own_folder / "model", **HEADS)
    draw = random.Random(1)
    words = ["".join(draw.choices("bcdefgh", k=4)) for _ in range(PROMPTS)]
    write_rows(own_folder / "prompts.jsonl", [{"input": f"{word}="} for word in words])
    write_rows(
        own_folder / "rows.jsonl",
        [{"input": f"{word}=", "output": word[::-1] + "<eos>"} for word in words * 8],
    )
    return own_folder


def flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        **small_grpo(workspace, folder, prompts=BATCH, samples=SAMPLES),
        "reward.remote_url": REWARDS / "letters.py",
        "actor.adam.lr": 1e-3,
        "algo.kl.init_coef": 0.0,
        "ckpt.save_steps": 1,
        **changes,
    }


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    """Complete a run in which no process is killed."""
    run("train_ppo_ray", flags(workspace, workspace / "whole"))
    return workspace / "whole"


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until a run has logged a step."""
    deadline = time.monotonic() + 400
    while steps_logged(folder) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def send_when(
    process: subprocess.Popen[str],
    folder: Path,
    number: signal.Signals,
    *,
    to: str,
    step: int,
    delay: float = 0.0,
) -> None:
    """Send a signal `delay` seconds after a step is logged.

    The target is the process with `to` in its command line, or the main process if `to` is empty.
    """
    wait_for_step(process, folder, step)
    time.sleep(delay)
    victims = (
        [each.pid for each in descendants(process.pid) if to in each.command]
        if to
        else [process.pid]
    )
    os.killpg(victims[0], number) if number == signal.SIGINT else os.kill(
        victims[0], number
    )  # Ctrl-C signals the process group


@pytest.mark.parametrize(
    ("number", "delay"),
    [
        (signal.SIGKILL, 0.0),
        pytest.param(signal.SIGKILL, 0.15, marks=pytest.mark.verify),
        pytest.param(signal.SIGSTOP, 0.05, marks=pytest.mark.verify),
    ],
)
def test_engine_that_is_killed_or_hangs_restarts_without_losing_samples(
    whole: Path, workspace: Path, number: signal.Signals, delay: float
) -> None:
    """The engine is killed while it is generating, idle, or receiving weights."""
    folder = workspace / f"engine-{number}-{delay}"
    process = launch(
        "train_ppo_ray", flags(workspace, folder, **{"vllm.num_engines": 2, "vllm.hang_timeout": 3})
    )
    send_when(process, folder, number, to="RolloutEngine", step=2, delay=delay)
    done = finish(process)
    assert done.status == 0, done.errors
    assert "was lost (" in done.printed and "Restart 1 of 3" in done.printed
    assert [row["response"] for row in samples(folder)] == [
        row["response"] for row in samples(whole)
    ]
    assert column(folder, "train/reward") == column(whole, "train/reward")
    assert column(folder, "train/actor_grad_norm") == pytest.approx(
        column(whole, "train/actor_grad_norm"), rel=1e-4
    )


@pytest.mark.verify
def test_engine_can_join_a_run_in_progress(whole: Path, workspace: Path) -> None:
    folder = workspace / "joined"
    more = {"vllm.max_engines": 2, "train.num_episodes": 30, "ckpt.save_steps": -1}
    done = run("train_ppo_ray", flags(workspace, folder, **more))
    said = done.printed
    assert (
        said.index("Engine 1 joins on")
        < said.index("Engine 1 is up")
        < said.index(f"step {30 * STEPS}/")
    )
    rewards = column(folder, "train/reward")
    assert len(rewards) == 30 * STEPS and rewards[:1] == column(whole, "train/reward")[:1]
    assert (
        max(column(folder, "train/logprob_gap_mean")) < 1e-5
    )  # the new engine sampled with current weights


def test_run_restarts_from_its_newest_checkpoint_if_a_training_process_is_killed(
    whole: Path, workspace: Path
) -> None:
    folder = workspace / "worker"
    process = launch("train_ppo_ray", flags(workspace, folder, **{"train.max_restarts": 1}))
    send_when(process, folder, signal.SIGKILL, to="WorkerHost", step=3)
    done = finish(process)
    assert done.status == 0, done.errors
    assert "Restart 1 of 1 (--train.max_restarts), from the run's newest checkpoint" in done.errors
    assert numbers(folder) == numbers(whole)
    assert samples(folder) == samples(whole)


CONTROL_STORE, RAYLET = "/gcs_server ", "/raylet/raylet "


@pytest.mark.parametrize(
    ("victim", "restarts"),
    [
        pytest.param(RAYLET, 0, marks=pytest.mark.verify),
        pytest.param(CONTROL_STORE, 0, marks=pytest.mark.verify),
        pytest.param(RAYLET, 1, marks=pytest.mark.verify),
        pytest.param(CONTROL_STORE, 1, marks=pytest.mark.verify),
    ],
)
def test_run_whose_ray_cluster_dies_restarts_or_exits_with_the_saved_step_in_the_message(
    whole: Path, workspace: Path, victim: str, restarts: int
) -> None:
    folder = workspace / f"{victim.strip('/ ').replace('/', '-')}-{restarts}"
    process = launch("train_ppo_ray", flags(workspace, folder, **{"train.max_restarts": restarts}))
    wait_for_step(process, folder, 3)
    started = descendants(process.pid)
    send_when(process, folder, signal.SIGKILL, to=victim, step=3)
    done = finish(process)
    assert survivors(started, within=30) == []
    assert (folder / "report.html").exists(), done.errors
    if restarts:
        assert done.status == 0, done.errors
        assert "Restart 1 of 1 (--train.max_restarts)" in done.errors
        assert numbers(folder) == numbers(whole)
        assert samples(folder) == samples(whole)
    else:
        error = done.errors.splitlines()[-1]
        assert done.status == 2 and error.startswith("error: "), done.errors
        saved = newest_step(folder)
        assert (
            victim.split("/")[-1].strip() in error
            and f"Step {saved} " in error
            and "--ckpt.load_enable" in error
        )
        assert "Traceback" not in done.errors and "raylet)" not in done.printed


@pytest.mark.parametrize("victim", [pytest.param(RAYLET, marks=pytest.mark.verify), CONTROL_STORE])
def test_run_succeeds_if_its_ray_cluster_dies_after_the_export(
    workspace: Path, victim: str
) -> None:
    folder = workspace / f"exported-{victim.strip('/ ').replace('/', '-')}"
    few = {"rollout.batch_size": PROMPTS, "train.batch_size": PROMPTS * SAMPLES}
    process = launch("train_ppo_ray", flags(workspace, folder, **few))
    assert process.stdout
    while not (line := process.stdout.readline()).startswith("model: "):
        assert line, process.communicate()
    send_when(process, folder, signal.SIGKILL, to=victim, step=1)
    done = finish(process)
    assert done.status == 0, done.errors
    assert (folder / "report.html").exists() and (folder / "model" / "config.json").exists()


@pytest.mark.verify
def test_run_on_a_joined_cluster_whose_raylet_dies_exits_with_the_saved_step_in_the_message(
    workspace: Path,
) -> None:
    home, folder, port = (
        Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")),
        workspace / "joined-ray",
        free_port(),
    )
    variables = environment(HOME=str(home), RAY_AUTH_MODE="disabled")
    ports = f"--port {port} --dashboard-port {free_port()} --ray-client-server-port {free_port()}"
    options = (
        f"--head {ports} --num-cpus 4 --block --dashboard-agent-listen-port 0 --temp-dir "
        f"{home / 'head'}"
    )
    node = start_node(options, workspace, variables, home / "head.log")
    try:
        settings = flags(workspace, folder, **{"train.max_restarts": 1})
        joined = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "disabled"}
        process = launch("train_ppo_ray", settings, variables=joined)
        wait_for_step(process, folder, 3)
        for each in descendants(node.pid):
            if RAYLET in each.command:
                os.kill(each.pid, signal.SIGKILL)
        done = finish(process)
    finally:
        end(node)
        shutil.rmtree(home, ignore_errors=True)
    assert done.status == 2, done.errors
    error = done.errors.splitlines()[-1]
    assert "raylet" in error and f"Step {newest_step(folder)} " in error
    assert (folder / "report.html").exists()


def newest_step(folder: Path) -> int:
    """Return the newest checkpoint's step."""
    names = [path.name for path in (folder / "checkpoints").glob("*.manifest.json")]
    return max(
        int(name.removeprefix("global_step").removesuffix(".manifest.json")) for name in names
    )


def test_interrupted_run_saves_its_last_step_and_resumes_with_the_same_metrics(
    whole: Path, workspace: Path
) -> None:
    folder = workspace / "interrupted"
    settings = flags(workspace, folder, **{"ckpt.save_steps": 100})
    process = launch("train_ppo_ray", settings)
    send_when(process, folder, signal.SIGINT, to="", step=2, delay=0.1)
    done = finish(process)
    assert (done.status, done.errors.strip().splitlines()[-1]) == (130, "interrupted"), done.errors
    assert [path.name for path in (folder / "checkpoints").glob("*.json")] == [
        f"global_step{steps_logged(folder)}.manifest.json"
    ]
    run("train_ppo_ray", {**settings, "ckpt.load_enable": True})
    assert numbers(folder) == numbers(whole)


@pytest.mark.verify
@pytest.mark.parametrize("optim", ["muon", "adam_8bit"])
def test_killed_run_on_two_ranks_resumes_with_the_same_metrics_with_other_optimizers(
    workspace: Path, optim: str
) -> None:
    def settings(name: str, **changes: Any) -> dict[str, Any]:
        ranks = {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2}
        return flags(
            workspace,
            workspace / f"{optim}-{name}",
            **{"actor.optim": optim, "actor.muon.lr": 2e-3},
            **ranks,
            **changes,
        )

    unbroken, broken = workspace / f"{optim}-whole", workspace / f"{optim}-killed"
    run("train_ppo_ray", settings("whole"))
    process = launch("train_ppo_ray", settings("killed"))
    send_when(process, broken, signal.SIGKILL, to="", step=3)
    finish(process)
    run("train_ppo_ray", settings("killed", **{"ckpt.load_enable": True}))
    assert numbers(broken) == numbers(unbroken)
    assert samples(broken) == samples(unbroken)
    weights = [load_file(folder / "model/model.safetensors") for folder in (broken, unbroken)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_offline_run_completes_and_exports_its_model_if_checkpoints_cannot_be_written(
    workspace: Path,
) -> None:
    """Files may be at most 400 KiB in size.

    The model takes 213 KiB, and the optimizer state takes 638 KiB.
    """
    folder = workspace / "no-room"
    settings = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "rows.jsonl",
        "data.output_key": "output",
        "data.max_len": 32,
        "train.batch_size": 48,
        "ds.param_dtype": "fp32",
        "ckpt.save_steps": 2,
        **places(folder),
    }
    limited = ["bash", "-c", 'ulimit -f 400; exec "$@"', "bash", *PLAIN]
    done = run("train_sft", settings, launcher=limited)
    assert done.printed.count(f"{folder / 'checkpoints'}") == 4, done.printed
    assert "Traceback" not in done.errors
    assert list((folder / "checkpoints").glob("*.manifest.json")) == []
    assert (folder / "model" / "model.safetensors").exists()


def test_interrupted_offline_run_saves_its_last_step_and_resumes_with_the_same_metrics(
    workspace: Path,
) -> None:
    def settings(folder: Path, **changes: Any) -> dict[str, Any]:
        return {
            "model.model_name_or_path": workspace / "model",
            "data.dataset": workspace / "rows.jsonl",
            "data.output_key": "output",
            "data.max_len": 32,
            "train.batch_size": 8,
            "train.max_epochs": 20,
            "ds.param_dtype": "fp32",
            "ckpt.save_steps": 1000,
            "data.dataloader_num_workers": 1,
            **places(folder),
            **changes,
        }

    unbroken, folder = workspace / "sft", workspace / "sft-terminated"
    run("train_sft", settings(unbroken))
    goes_on = settings(folder, **{"ckpt.load_enable": True})
    for flags, number, step, expected in (
        (settings(folder), signal.SIGTERM, 5, (143, "terminated")),
        (goes_on, signal.SIGINT, 20, (130, "interrupted")),
    ):
        process = launch("train_sft", flags)
        send_when(process, folder, number, to="", step=step)
        done = finish(process)
        assert (done.status, done.errors.strip().splitlines()[-1]) == expected, done.errors
        assert RESUME_HINT.format(steps_logged(folder)) in done.printed
    run("train_sft", goes_on)
    assert numbers(folder) == numbers(unbroken)
