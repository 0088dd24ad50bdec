"""Clean shutdown on SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from openrlhf.termination import STOPPING

PROGRAM = """
import signal, sys
from openrlhf import termination
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    with termination.exit_on_signals():
        with termination.deferred():
            print("up", flush=True)
            if sys.stdin.readline() == "done\\n":
                print("finished", flush=True)
        print("not stopped", flush=True)
except KeyboardInterrupt:
    print("at once", flush=True)
"""
NOTICE = STOPPING.decode().strip()


@pytest.mark.parametrize(
    ("case", "numbers", "status", "printed", "errors"),
    [
        ("", [signal.SIGINT], 130, ["finished"], [NOTICE, "interrupted"]),
        ("", [signal.SIGTERM, signal.SIGTERM], 143, ["finished"], [NOTICE, "terminated"]),
        ("", [signal.SIGINT, signal.SIGINT], 0, ["at once"], [NOTICE]),
        ("", [signal.SIGTERM, signal.SIGINT], 0, ["at once"], [NOTICE]),
        ("ignored", [signal.SIGINT], 0, ["finished", "not stopped"], []),
        ("ignored", [signal.SIGTERM, signal.SIGINT], 143, ["finished"], [NOTICE, "terminated"]),
    ],
)
def test_block_finishes_before_exit_unless_ctrl_c_follows_the_first_signal(
    case: str, numbers: list[signal.Signals], status: int, printed: list[str], errors: list[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, case],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "up\n"
    process.send_signal(numbers[0])
    if errors:  # wait until the process has handled the first signal
        assert process.stderr.readline() + process.stderr.readline() == f"\n{NOTICE}\n"
    for number in numbers[1:]:
        process.send_signal(number)
    if "at once" in printed:
        assert process.stdout.readline() == "at once\n"
        printed = []
    out, err = process.communicate("done\n", timeout=60)
    assert (process.returncode, out.splitlines(), err.split()) == (status, printed, errors[1:])


HELD = """
import os, threading, time
from openrlhf import termination

def end():
    termination.hold_main_thread()
    time.sleep(0.5)
    print("ended", flush=True)
    os._exit(7)

with termination.exit_on_signals():
    threading.Thread(target=end).start()
    while True:
        print("works", flush=True)
        time.sleep(0.1)
"""


def test_held_main_thread_is_blocked_until_another_thread_exits_process() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[-1] == "ended"
    assert done.stdout.count("works") <= 3


ASKED_WHILE_HELD = """
import os, signal, sys, threading, time
from openrlhf import termination

def end():
    termination.hold_main_thread()
    time.sleep(0.3)
    held = termination.asked()
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.3)
    print(held, termination.asked(), flush=True)
    os._exit(7)

with termination.exit_on_signals():
    threading.Thread(target=end).start()
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_held_main_thread_records_exit_request(number: int) -> None:
    command = [sys.executable, "-c", ASKED_WHILE_HELD, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (7, ["0", str(128 + number)], "")
