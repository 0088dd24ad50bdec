"""A table of evaluation results on the terminal: one row per data source."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.observability.lines import compact


def print_sources(rows: Mapping[str, Mapping[str, float]], *, console: Console) -> None:
    """Print the rows, which have the same columns. Integers are counts."""
    columns = list(next(iter(rows.values())))
    table = Table("data source", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for source, numbers in rows.items():
        table.add_row(Text(source), *(_shown(numbers[column]) for column in columns))
    console.print("", table)


def _shown(number: float) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    return compact(number) if math.isfinite(number) else "-"
