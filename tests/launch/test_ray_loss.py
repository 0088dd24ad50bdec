"""Tests for whether a command exits or restarts after its Ray cluster has died."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from openrlhf.launch.ray_loss import RayLoss

ENDS = """
import os, signal, sys, threading, time
from openrlhf import termination
from openrlhf.cluster.ray_watch import RayProcess
from openrlhf.launch.ray_loss import RayLoss

if "again" in sys.argv:
    sys.exit(7)
loss = RayLoss(restart=lambda lost: ["again"])

def close():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.5)

with termination.exit_on_signals(), loss.closing(close):
    raylet = RayProcess(name="raylet", address=("127.0.0.1", 1), own=False)
    threading.Thread(target=loss, args=(raylet,)).start()
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("number", "end"),
    [(0, (7, "")), (signal.SIGTERM, (143, "terminated")), (signal.SIGINT, (130, "interrupted"))],
)
def test_command_terminated_while_closing_does_not_restart(
    number: int, end: tuple[int, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(int(number))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == end


def test_close_callback_is_removed_if_its_block_raises() -> None:
    loss = RayLoss()
    with pytest.raises(ValueError), loss.closing(lambda: None):
        raise ValueError
    assert loss._close is None
