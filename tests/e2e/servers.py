"""A reward model that `serve_rm` serves in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.commands import launch


@dataclass(frozen=True, kw_only=True)
class RewardModelServer:
    """A running server, whose `url` is a value for `--reward.remote_url`."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def reward_model_server(model: Path, **flags: Any) -> Iterator[RewardModelServer]:
    """Run a float32 server on a free port until the block exits.

    Waits until the server responds. In the names of keyword arguments, `__` stands for the dot in a
    flag name.
    """
    start = {"reward.model_name_or_path": model, "ds.param_dtype": "fp32", "port": 0}
    process = launch(
        "serve_rm", start | {name.replace("__", "."): value for name, value in flags.items()}
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()  # an empty line means that the server exited
        assert said.startswith(f"serving {model} at http://"), process.communicate()
        yield RewardModelServer(url=said.split()[-1], process=process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
