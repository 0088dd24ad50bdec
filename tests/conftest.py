"""Settings for all tests: one thread per process, no Hub access, test data and GPU markers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Set these variables before anything imports torch or a Hugging Face library.
# Child processes inherit the variables.
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
)  # how long an example takes depends on the machine
hypothesis.settings.load_profile("patient")

# pytest writes each test's name to the environment, and glibc moves all variables when one is
# added. The test process has crashed when a Ray thread read the environment at the same time. For
# example, gRPC reads TZ when a connection closes.
assert runner._update_current_test_var
runner._update_current_test_var = lambda item, when: None

# A shell makes background processes ignore Ctrl-C.
# Commands that tests interrupt would inherit this setting.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        metavar="PART/PARTS",
        help="with -m verify: run one part of the tests, except those that passed on this code",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record `-m verify` outcomes once per session, in the process that workers report to."""
    if config.option.markexpr == "verify" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Verified(config.option.shard))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the test data folder outside the repository, or skip the test if there is none."""
    folder = ROOT / os.environ.get("OPENRLHF_TEST_DATA", "../shared/data")
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}: set OPENRLHF_TEST_DATA to the test data folder")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if there is no CUDA device.

    Rehearsals (tests/gpu/rehearsal.py) run these tests even without a device.
    """
    if count_gpus() == 0 and not REHEARSAL:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def quick_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make notices identical on every machine that runs the tests."""
    monkeypatch.setattr(machine, "has_quick_bfloat16", lambda: True)


def pytest_runtest_setup() -> None:
    machine.cluster_gpus = None  # forget any cluster that the test declared or joined
    machine.only_plans = False
