"""The command that replaces a command whose Ray has died."""

from __future__ import annotations

import sys

import pytest

from openrlhf.distributed.ray_watch import LostRay
from openrlhf.launch.start import Restarts
from tests.config.commands import ppo
from tests.ranks import ROOT

STORE = LostRay("control store", own=True)
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
def test_command_restarts_however_its_path_is_written_and_other_programs_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, restarts: bool
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENRLHF_RESTARTS", "0")
    monkeypatch.setattr(sys, "argv", [program])
    flags = Restarts(ppo(RESTARTS)).flags_after(STORE)
    assert (flags is not None) == restarts
    assert ("--train.max_restarts 2" in capsys.readouterr().err) != restarts
