"""Tests that commands print `--help` and report user errors before they load any library."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.sources import ROOT, package

COMMANDS = [
    module.name
    for module in package().values()
    if module.room == "cli" and "def main(" in module.text
    if module.name not in ("openrlhf.cli.common", "openrlhf.cli.main")
]


def run(command: str, *words: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Return the completed process and the top-level names of its imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", command, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    report = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.rpartition("|")[2].strip().split(".")[0] for line in report}


def assert_no_library(imported: set[str]) -> None:
    ours = {"openrlhf", "_distutils_hack", "_virtualenv"}  # the last two are loaded by .pth files
    assert "openrlhf" in imported
    assert not imported & packages_distributions().keys() - ours


def test_all_commands_are_covered() -> None:
    assert {"openrlhf.cli.train_sft", "openrlhf.cli.train_ppo_ray"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_library(command: str) -> None:
    done, imported = run(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    assert_no_library(imported)


@pytest.mark.parametrize("command", COMMANDS)
def test_user_error_exits_with_status_2_before_importing_libraries(command: str) -> None:
    done, imported = run(command, "--train.no_such_flag", "1")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert_no_library(imported)
