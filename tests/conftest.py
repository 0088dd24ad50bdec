"""Settings of all tests: one thread per process, no Hub, and the locations of data and devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Before anything imports torch or a Hugging Face library; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import hypothesis
import pytest
from _pytest import runner

from openrlhf.config import machine
from openrlhf.config.machine import count_gpus
from tests.gpu.rehearsal import REHEARSAL
from tests.verify.record import Verified

hypothesis.settings.register_profile(
    "patient", deadline=None
)  # the time of an example depends on the machine
hypothesis.settings.load_profile("patient")

# pytest writes the name of each test into the environment. A thread of Ray that reads it at that
# moment (gRPC asks for TZ when a connection ends) has crashed the test process, because glibc moves
# the variables when it adds one.
assert runner._update_current_test_var
runner._update_current_test_var = lambda item, when: None

# A shell makes background processes ignore Ctrl-C, and the commands that tests interrupt would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        metavar="PART/PARTS",
        help="with -m verify: one part of the tests, without what has passed on this code",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes of `-m verify` once per session, in the process that workers report to."""
    if config.option.markexpr == "verify" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Verified(config.option.shard))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of test data outside the repository; skip the test if it is missing."""
    folder = ROOT / os.environ.get("OPENRLHF_TEST_DATA", "../shared/data")
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}: OPENRLHF_TEST_DATA names its folder")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if there is no CUDA device.

    They run in a rehearsal (tests/gpu/rehearsal.py).
    """
    if count_gpus() == 0 and not REHEARSAL:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def quick_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make notices the same on every machine that runs the tests."""
    monkeypatch.setattr(machine, "has_quick_bfloat16", lambda: True)


def pytest_runtest_setup() -> None:
    machine.cluster_gpus = None  # the clusters that a test declares or joins end with it
