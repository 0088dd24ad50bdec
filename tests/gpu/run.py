"""Runs the GPU checks one after another and writes their results to one JSON file.

`make test-gpu` runs the checks in at most five minutes. `python -m tests.gpu.run --minutes 10` sets
another limit. `python -m tests.gpu.run --rehearse --output seen.json` runs the checks on a CPU with
small models.

A check that fails, hangs or crashes its process does not affect checks in other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from openrlhf.config.machine import installed

MINUTES = 5
FOLDER = "tests/gpu"
NO_TIME = "no time left"
REHEARSAL_FACTOR = 2  # extends time limits for a busy CPU
SHORTEST_S = 5  # minimum time that must be left to start a check
# Each entry has a time limit in seconds, and its tests share a process.
# The first import of the libraries on a machine takes 20 seconds.
CHECKS = {  # paths that no other test covers; about four minutes on an H200
    (
        "test_packing.py",
        "test_publication.py::test_weight_hash_is_the_same_on_gpu_and_cpu",
        "test_publication.py::test_weights_are_sent_to_another_gpu_by_nccl",
    ): 120,
    (
        "test_publication.py::test_weights_are_sent_to_another_process_on_the_same_gpu_by_cuda_ipc",
    ): 60,
    (
        "test_publication.py::test_engine_on_the_gpu_of_the_trainer_serves_the_published_weights",
        "test_publication.py::test_engine_frees_gpu_memory_while_asleep_and_wakes_on_request",
    ): 150,
    ("test_speed.py::test_training_speed_is_recorded",): 90,
}
MORE = {  # an entry runs only if its full time limit is left
    ("test_hybrid.py::test_grpo_runs_with_models_and_engine_on_one_gpu",): 240,
    ("test_speed.py::test_generation_speed_is_recorded",): 180,
}
PACKAGES = ("torch", "vllm", "ray", "deepspeed", "transformers", "flash-attn")


def versions() -> dict[str, str]:
    """Return the versions of installed packages, and the GPUs as listed by nvidia-smi."""
    found = {package.name: package.version for package in map(installed, PACKAGES) if package}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found["gpus"] = subprocess.run(
            query, capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        found["gpus"] = ""
    return found


def check(nodes: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Run some checks in one process.

    Returns each test's outcome, duration in seconds and recorded figures, and the end of the
    process's output if the test failed. If the process dies early, the result has one entry per
    element of `nodes`.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        log = Path(folder) / "log"
        code = _run_pytest(nodes, seconds, report=report, log=log)
        took = time.monotonic() - began
        printed = log.read_text(errors="replace")[-4000:]
        if not report.exists():
            outcome = "out of time" if took >= seconds else "failed"
            lost = {"outcome": outcome, "seconds": round(took, 1), "said": printed}
            return {node: lost for node in nodes}
        seen: dict[str, dict[str, Any]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            file = str(case.get("classname")).split(".")[-1]
            seen[f"{file}.py::{case.get('name')}"] = _result(case, printed)
        if code and all(result["outcome"] != "failed" for result in seen.values()):
            seen[" ".join(nodes)] = {"outcome": "failed", "said": printed}
        return seen


def _run_pytest(nodes: Sequence[str], seconds: float, *, report: Path, log: Path) -> int:
    """Run pytest with a time limit in seconds and return its exit status."""
    command = [
        "timeout",
        "--kill-after=5",
        str(seconds),
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
    ]
    # Before a hanging check is killed, pytest prints a stack trace.
    stacks = f"faulthandler_timeout={max(1, int(seconds) - 5)}"
    options = [f"--junitxml={report}", "-p", "no:cacheprovider", "-o", stacks]
    options += ["-o", "junit_family=xunit1"]
    paths = [str(Path(FOLDER) / node) for node in nodes]
    with log.open("w") as output:
        done = subprocess.run(
            [*command, *paths, *options], stdout=output, stderr=output, check=False
        )
    return done.returncode


def _result(case: ElementTree.Element, printed: str) -> dict[str, Any]:
    """Return the report entry for one test."""
    result: dict[str, Any] = {"outcome": "passed", "seconds": round(float(case.get("time", 0)), 1)}
    for figure in case.iter("property"):
        result[str(figure.get("name"))] = figure.get("value")
    skipped = case.find("skipped")
    if skipped is not None:
        return result | {"outcome": "skipped", "reason": skipped.get("message")}
    if case.find("failure") is not None or case.find("error") is not None:
        return result | {"outcome": "failed", "said": printed}
    return result


def run(
    checks: Mapping[Sequence[str], int],
    output: Path,
    minutes: float = MINUTES,
    *,
    more: Mapping[Sequence[str], int] | None = None,
) -> bool:
    """Run the checks, and then run `more` if time is left.

    Updates the file `output` after each check.
    Returns True if all of `checks` were run, at least one check passed, and none failed.
    """
    results: dict[str, dict[str, Any]] = {}
    seen = {"versions": versions(), "checks": results}
    end = time.monotonic() + 60 * minutes
    planned = [(nodes, seconds, SHORTEST_S) for nodes, seconds in checks.items()]
    planned += [(nodes, seconds, seconds) for nodes, seconds in (more or {}).items()]
    for nodes, seconds, needed in planned:
        left = end - time.monotonic()
        fresh: dict[str, dict[str, Any]] = {node: {"outcome": NO_TIME} for node in nodes}
        if left > needed:
            fresh = check(nodes, min(seconds, left))
        results.update(fresh)
        output.write_text(json.dumps(seen, indent=1) + "\n")
        for node, result in fresh.items():
            figures = [f"{name} {value}" for name, value in result.items() if name != "said"]
            print(f"{node}: {', '.join(figures)}", flush=True)
    outcomes = {result["outcome"] for result in results.values()}
    required = {results[node]["outcome"] for nodes in checks for node in nodes if node in results}
    return (
        "passed" in outcomes
        and outcomes <= {"passed", "skipped", NO_TIME}
        and NO_TIME not in required
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the checks, and exit with status 1 if a check failed or did not run for lack of time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="time for all checks (default: %(default)s; 10 runs all of them)",
    )
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU with small models")
    chosen = parser.parse_args(argv)
    checks, more = CHECKS, MORE
    if chosen.rehearse:
        os.environ["OPENRLHF_REHEARSE_GPU"] = "1"
        checks = {nodes: REHEARSAL_FACTOR * seconds for nodes, seconds in checks.items()}
        more = {nodes: REHEARSAL_FACTOR * seconds for nodes, seconds in more.items()}
    passed = run(checks, chosen.output, chosen.minutes, more=more)
    print(f"{chosen.output} contains the figures and the output of failed checks.")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
