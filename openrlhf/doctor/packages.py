"""Checks of the installed packages: this project, its requirements, and optional packages.

Heavier imports are inside the functions, because every command runs some of these checks.
"""

import platform
import sys
from importlib.metadata import Distribution, distributions

from openrlhf import __version__
from openrlhf.checks import Finding
from openrlhf.config import machine
from openrlhf.config.flags import toml_beside
from openrlhf.doctor.verdict import verdict

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
            required, version = ours.requires or [], ours.version
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
        package = machine.installed(requirement.name)
        installed = package.version if package else "none"
        fits = package and requirement.specifier.contains(installed, prereleases=True)
        if not fits:
            seen = f"{requirement} is required, but {installed} is installed."
            fix = f"pip install '{requirement}'"
            found.append(Finding(seen, fix, fails=True))
    return found or [Finding(f"openrlhf {__version__} and its requirements", passes=True)]


def vllm_versions() -> list[Finding]:
    """Return failures if vLLM is missing, unsupported or incompatible with other packages."""
    from packaging.specifiers import SpecifierSet

    extra = "vllm" if machine.count_gpus() else "cpu"
    fix = f"Install a supported version: pip install -e '.[{extra}]' (see the README)."
    vllm = machine.installed("vllm")
    if vllm is None:
        return [Finding("vllm is not installed.", fix, fails=True)]

    def allows(versions: str, version: str) -> bool:
        return SpecifierSet(versions).contains(version, prereleases=True)

    found_vllm = f"{vllm.name} {vllm.version}"
    needs = [packages for versions, packages in STACKS.items() if allows(versions, vllm.version)]
    if not needs:
        seen = f"{found_vllm} is installed, but this release supports {' or '.join(STACKS)}."
        return [Finding(seen, fix, fails=True)]
    mismatches: list[Finding] = []
    for name, versions in needs[0].items():
        found = machine.installed(name)
        version = found.version if found else "none"
        if version == "none" or not allows(versions, version):
            seen = f"{found_vllm} requires {name} {versions}, but {version} is installed."
            fix = "Install a matching version, or a different vLLM (docs/gpu.md, Versions of vLLM)."
            mismatches.append(Finding(seen, fix, fails=True))
    return mismatches
