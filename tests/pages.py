"""Generated parts of the pages in docs/: links to source files by symbol, curves and metrics.

Tests check the generated parts, and the flags, defaults and flag sets on the pages.
`python -m tests.pages` (`make docs`) rewrites the links, the curves and the page of metrics.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from openrlhf.config.flags import Flag, convert
from openrlhf.observability.glossary import GLOSSARY
from tests.plausible import range_of
from tests.sources import ROOT, package
from tests.verify.learning import RECORDS, by_name, page, read_runs, summary

ALGORITHMS = ROOT / "docs" / "algorithms.md"
METRICS = ROOT / "docs" / "metrics.md"
CURVES = RECORDS.with_suffix(".md")
# Matches a symbol link such as [`advantages.gae`](../openrlhf/algorithms/advantages.py).
# The dotted suffix must have exactly one definition.
LINK = re.compile(r"\[`(\w+(?:\.\w+)+)`\]\((?:[^)\s]*\.py(?:#L\d+)?)?\)")
# `--actor.eps_clip (0.2)`
FLAG = re.compile(r"`--([\w.]+)(?: \(([^)`]*)\))?`")
# ```bash gspo: a block with the flags of the method gspo
FLAG_SET = re.compile(r"^```bash (\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# <!-- learned gspo -->0.33 → 0.51<!-- end -->
LEARNED = re.compile(r"(<!-- learned (\w+) -->).*?(<!-- end -->)", re.DOTALL)

METRIC_STAGES = {
    "train": "Training",
    "rollout": "Rollout",
    "timing": "Time and throughput",
    "eval": "Evaluation",
}

METRICS_INTRODUCTION = (
    "This page lists every metric that a run logs, under its name in `metrics.jsonl` and in the "
    "trackers. A mean is weighted\n"
    "by what it counts (action tokens, target tokens, episodes or pairs) over all ranks and "
    "micro-batches of a step, so it does\n"
    "not depend on how the batch was split. Metrics that your reward function or agent adds appear "
    "as `train/<name>`, reduced\n"
    "as means. A value outside its range is a bug in this project: please report it."
)


def pages() -> list[Path]:
    """Return the handwritten pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def definitions() -> dict[str, list[Path]]:
    """Map each dotted suffix of a definition's full name to the files that define the name.

    For example, `advantages.gae` is a valid name but `gae` is not.
    """
    places: dict[str, list[Path]] = {}
    for module in package().values():
        for symbol in _symbols(module.tree.body):
            parts = [*module.name.split("."), symbol]
            for first in range(len(parts) - 1):
                places.setdefault(".".join(parts[first:]), []).append(module.path)
    return places


def _symbols(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name
            case ast.ClassDef():
                yield prefix + node.name
                yield from _symbols(node.body, f"{prefix}{node.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def relinked(text: str, folder: Path) -> str:
    """Return the text with every symbol link pointing to the symbol's definition.

    Raises ValueError for a symbol that has no definition or several definitions.
    """

    def link(found: re.Match[str]) -> str:
        symbol = found[1]
        places = definitions().get(symbol, [])
        if len(places) != 1:
            raise ValueError(
                f"{symbol} is defined {len(places)} times in openrlhf/, not once: {places}"
            )
        return f"[`{symbol}`]({os.path.relpath(places[0], folder)})"

    return LINK.sub(link, text)


def with_curves(text: str) -> str:
    """Return the text with the recorded curve inserted at each curve marker."""
    seen = {name: summary(runs) for name, runs in by_name(read_runs()).items()}

    def learned(found: re.Match[str]) -> str:
        return f"{found[1]}{seen.get(found[2], 'not on record yet')}{found[3]}"

    return LEARNED.sub(learned, text)


def flag_sets() -> dict[str, list[str]]:
    """Return the flags of every named method in docs/algorithms.md."""
    blocks = FLAG_SET.findall(ALGORITHMS.read_text(encoding="utf-8"))
    return {name: flags.replace("\\\n", " ").split() for name, flags in blocks}


def says_its_default(flag: Flag, said: str) -> bool:
    """Return whether the text in parentheses after a flag's name is the flag's default.

    The default may be a number in any notation, "on", "off" or "unset".
    """
    if flag.shape == "switch":
        return said == ("on" if flag.default else "off")
    if flag.default in (None, (), ""):
        return said == "unset"
    try:
        return (
            convert(flag, said.split() if flag.shape in ("pair", "list") else said) == flag.default
        )
    except ValueError:
        return False


def rewritten(path: Path) -> str:
    """Return a page's text with all generated parts up to date."""
    return with_curves(relinked(path.read_text(encoding="utf-8"), path.parent))


def metrics_page() -> str:
    """Return the page that documents all metrics: one table per stage, in alphabetical order."""
    lines = ["# Metrics", "", METRICS_INTRODUCTION]
    for stage, title in METRIC_STAGES.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| name | reduces as | unit | range | meaning |",
            "|---|---|---|---|---|",
        ]
        for name in sorted(name for name in GLOSSARY if name.startswith(f"{stage}/")):
            spec = GLOSSARY[name]
            cells = f"`{name}`", spec.reduces, spec.unit or "–", range_of(spec), spec.definition
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write_pages() -> None:
    """Rewrite the generated parts of all pages."""
    METRICS.write_text(metrics_page(), encoding="utf-8")
    runs = read_runs()
    if runs:
        CURVES.write_text(page(runs), encoding="utf-8")
    for path in pages():
        path.write_text(rewritten(path), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
