"""Tests for restarting a command in a new process, with the same flags, after Ray has died."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import RunState
from openrlhf.cluster.ray_watch import RayProcess
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.start import Restarts, newest_checkpoint
from tests.config.commands import ppo
from tests.ranks import ROOT

STORE = RayProcess(name="control store", address=("127.0.0.1", 1), own=True)
RESTARTS = "--train.max_restarts 2"


@pytest.mark.parametrize(
    ("program", "restarts"),
    [
        ("openrlhf/cli/train_ppo_ray.py", True),
        (f"{ROOT}/openrlhf/cli/../cli/train_ppo_ray.py", True),
        ("/usr/bin/openrlhf", True),
        ("train.py", False),
        ("-c", False),
    ],
)
def test_only_openrlhf_commands_restart_regardless_of_path_spelling(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    restarts: bool,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENRLHF_RESTARTS", "0")
    monkeypatch.setattr(sys, "argv", [program])
    flags = Restarts(ppo(RESTARTS)).begin_restart(STORE)
    assert (flags is not None) == restarts
    assert ("--train.max_restarts 2" in capsys.readouterr().err) != restarts


@pytest.mark.parametrize(
    ("given", "newest"), [("", 1), ("ckpt.load_enable: false", 1), ("ckpt.load_enable: true", 2)]
)
def test_restart_resumes_another_runs_checkpoint_only_if_the_user_set_load_enable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, newest: int
) -> None:
    monkeypatch.setenv("OPENRLHF_RESTARTS", "0")
    monkeypatch.setenv("OPENRLHF_CONTINUES_ITSELF", "0")
    monkeypatch.setattr(sys, "argv", ["openrlhf"])
    file = tmp_path / "flags.yaml"
    file.write_text(given)
    line = (
        f"{RESTARTS} --run.dir {tmp_path / 'run'} --ckpt.path {tmp_path / 'checkpoints'} "
        f"--config {file}"
    )
    restarts = Restarts(ppo(line))
    save(restarts.config, 1, tmp_path / "run")
    save(restarts.config, 2, tmp_path / "other")
    for done in (1, 2):
        flags = restarts.begin_restart(STORE)
        assert flags is not None
        line += f" {' '.join(flags)}"
        restarts = Restarts(ppo(line))
        checkpoint = newest_checkpoint(restarts.config)
        assert restarts.done == done and restarts.config.ckpt.load_enable
        assert checkpoint and checkpoint.state.step == newest
        by_user = bool(restarts.config.given.get("ckpt.load_enable"))  # as in `train`
        assert by_user == (newest == 2)


def save(config: PPOConfig, step: int, run_dir: Path) -> None:
    """Save a checkpoint of the run whose folder is `run_dir`."""
    manager = CheckpointManager(config.ckpt)
    staged = manager.begin(step)
    for place in staged.places:
        (staged.directory / place / "states").touch()
    manager.commit(staged, state=RunState(step=step, run_dir=str(run_dir)))
