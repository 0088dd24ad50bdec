"""Permission for processes with vLLM workers to use the CPU's matrix registers (AMX)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from openrlhf.rollout.engine_settings import engine_environment
from tests.ranks import ROOT

PROGRAM = """
import ctypes
import openrlhf.rollout.engine_worker
permitted = ctypes.c_ulong(0)
arch_prctl, get_permissions = 158, 0x1022
assert ctypes.CDLL(None).syscall(arch_prctl, get_permissions, ctypes.byref(permitted)) == 0
print("tiles:", permitted.value >> 18 & 1)
"""


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this CPU has no matrix registers (AMX)"
)
def test_importing_the_worker_requests_permission_to_use_amx() -> None:
    environment = os.environ | engine_environment("cpu") | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "tiles: 1" in done.stdout
