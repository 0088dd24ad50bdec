"""Runs the checks of a GPU one after the other, each in a process of its own, and writes what was
seen as one JSON file.

    make test-gpu
    python -m tests.gpu.run --rehearse --output seen.json    # on a CPU, with small models

A check that fails, hangs or takes the process with it does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from openrlhf.config.machine import installed

MINUTES = 8
FOLDER = "tests/gpu"
CHECKS = {  # short ones first, then those that start an engine; with the seconds that each may take
    "test_publication.py::test_a_hash_is_the_same_on_gpu_and_cpu": 60,
    "test_publication.py::test_weights_reach_another_process_on_the_same_gpu_by_cuda_ipc": 90,
    "test_publication.py::test_weights_reach_another_gpu_by_nccl": 90,
    "test_packing.py::test_packed_attention_and_its_gradient_are_those_of_float64_on_a_cpu": 60,
    "test_packing.py::test_packed_rows_score_as_single_rows[flash_attention_2]": 90,
    "test_packing.py::test_packed_rows_score_as_single_rows[sdpa]": 90,
    "test_hybrid.py::test_grpo_with_models_and_engine_on_one_gpu": 240,
    "test_publication.py::test_an_engine_on_the_trainers_gpu_serves_what_was_published": 120,
    "test_speed.py::test_training": 120,
    "test_speed.py::test_generation": 180,
    "test_hybrid.py::test_an_engine_frees_its_gpu_in_its_sleep_and_wakes_when_it_is_asked": 120,
}
PACKAGES = ("torch", "vllm", "ray", "deepspeed", "transformers", "flash-attn")


def versions() -> dict[str, str]:
    """Installed packages, and the GPUs as nvidia-smi lists them."""
    found = {package.name: package.version for package in map(installed, PACKAGES) if package}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found["gpus"] = subprocess.run(
            query, capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        found["gpus"] = ""
    return found


def check(node: str, seconds: float) -> dict[str, Any]:
    """Run one check. Returns its outcome, its seconds, the figures it recorded, and the end of what
    it said if it failed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [
            "timeout",
            "--kill-after=5",
            str(seconds),
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            node,
        ]
        stacks = f"faulthandler_timeout={max(1, int(seconds) - 5)}"  # where a check hangs, before it is ended
        with log.open("w") as output:
            code = subprocess.run(
                [
                    *command,
                    f"--junitxml={report}",
                    "-p",
                    "no:cacheprovider",
                    "-o",
                    stacks,
                    "-o",
                    "junit_family=xunit1",
                ],
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
        case = ElementTree.parse(report).find(".//testcase") if report.exists() else None
        figures = (
            {}
            if case is None
            else {str(p.get("name")): p.get("value") for p in case.iter("property")}
        )
        skipped = None if case is None else case.find("skipped")
        took = time.monotonic() - began
        outcome = "passed" if code == 0 else "out of time" if took >= seconds else "failed"
        seen: dict[str, Any] = {"outcome": outcome, "seconds": round(took, 1), **figures}
        if skipped is not None:
            return seen | {"outcome": "skipped", "reason": skipped.get("message")}
        return (
            seen
            if outcome == "passed"
            else seen | {"said": log.read_text(errors="replace")[-4000:]}
        )


def run(checks: dict[str, int], output: Path, minutes: float = MINUTES) -> bool:
    """Run the checks and write `output` after each. Returns whether some passed and none failed."""
    seen: dict[str, Any] = {"versions": versions(), "checks": {}}
    end = time.monotonic() + 60 * minutes
    for node, seconds in checks.items():
        left = end - time.monotonic()
        seen["checks"][node] = result = (
            check(node, min(seconds, left)) if left > 5 else {"outcome": "no time left"}
        )
        output.write_text(json.dumps(seen, indent=1) + "\n")
        print(
            f"{node}: "
            + ", ".join(f"{name} {value}" for name, value in result.items() if name != "said"),
            flush=True,
        )
    outcomes = {result["outcome"] for result in seen["checks"].values()}
    return "passed" in outcomes and outcomes <= {"passed", "skipped"}


def main(argv: Sequence[str] | None = None) -> None:
    """Exit with status 1 if a check failed, or if none could run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small models")
    chosen = parser.parse_args(argv)
    if chosen.rehearse:
        os.environ["OPENRLHF_REHEARSE_GPU"] = "1"
    passed = run({f"{FOLDER}/{node}": seconds for node, seconds in CHECKS.items()}, chosen.output)
    print(f"{chosen.output} has the figures, and what failed checks said.")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
