"""Tests that a lock left by a killed compilation does not block later runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.training.compiling import compiling
from tests.ranks import ROOT

BUILDS = Path.home() / ".cache" / "torch_extensions"


@pytest.mark.parametrize("place", ["cpu_adam", "py311_cpu/async_io"])
def test_lock_file_that_no_process_has_open_is_removed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / place / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with compiling():
        assert not lock.exists()


def test_lock_of_a_running_compilation_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    compilation = subprocess.Popen(
        [sys.executable, "-c", "import sys; open(sys.argv[1], 'x'); f = open(sys.argv[1]);"
         "print('open', flush=True); sys.stdin.read()", str(lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert compilation.stdout and compilation.stdout.readline() == b"open\n"
        with compiling():
            assert lock.exists()
        compilation.kill()
        compilation.wait()
        with compiling():
            assert not lock.exists()
    finally:
        compilation.kill()
        compilation.communicate()


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_offloaded_adam_is_loaded_despite_a_planted_lock(tmp_path: Path) -> None:
    """Torch's own loader would wait for the lock forever.

    The operator is copied from the machine's cache or, if it is not cached, compiled.
    """
    for build in BUILDS.glob("*/cpu_adam"):
        shutil.copytree(build, tmp_path / "cpu_adam", dirs_exist_ok=True)
    (tmp_path / "cpu_adam").mkdir(exist_ok=True)
    (tmp_path / "cpu_adam" / "lock").touch()
    code = (
        "import torch\n"
        "from openrlhf.config.optimizer import OptimizerConfig\n"
        "from openrlhf.training.optimizers import make_optimizer\n"
        "print(type(make_optimizer(torch.nn.Linear(2, 2), OptimizerConfig(), offload=True)))\n"
    )
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert "DeepSpeedCPUAdam" in done.stdout, done.stdout + done.stderr
    assert "lock" in done.stderr
