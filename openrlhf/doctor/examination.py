"""Runs all checks of `openrlhf doctor` and prints their findings."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn

from openrlhf.checks import Finding
from openrlhf.config.doctor import DoctorConfig
from openrlhf.doctor import packages, resources, software
from openrlhf.doctor.probes import ProbeError
from openrlhf.reporting import say

CHECKS: list[Callable[[], Iterable[Finding]]] = [
    packages.python,
    packages.other_package,
    packages.requirements,
    software.torch,
    software.vllm,
    software.deepspeed,
    *(partial(software.optional, name) for name in software.OPTIONAL),
    software.ray,
    resources.memory,
    resources.shared_memory,
    resources.disks,
    resources.limits,
    resources.sandbox,
    resources.hub,
]


def examine(config: DoctorConfig) -> NoReturn:
    """Run all checks, print their findings, and exit with status 1 if any check failed."""
    status = 0
    rows: list[dict[str, str]] = []
    for finding in findings():
        if finding.fails:
            status = 1
        rows.append({"level": level(finding), "seen": finding.seen, "fix": finding.fix})
        if not config.json:
            say(f"{level(finding):8} {finding}")
    if config.json:
        say(json.dumps(rows, indent=2))
    raise SystemExit(status)


def findings() -> Iterable[Finding]:
    """Yield the findings of all checks."""
    for check in CHECKS:
        try:
            yield from check()
        except ProbeError as error:
            yield error.finding
        except ModuleNotFoundError as error:
            yield Finding(f"{error.name} is not installed.", packages.REINSTALL, fails=True)


def level(finding: Finding) -> str:
    """Return a finding's level: pass, warning or failure."""
    if finding.fails:
        return "failure"
    if finding.passes:
        return "pass"
    return "warning"
