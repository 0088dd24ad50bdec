"""Terminal tables: evaluation results by data source, and rows of text."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.observability.lines import compact


def print_sources(rows: Mapping[str, Mapping[str, float]], *, console: Console) -> None:
    """Print one row per data source. All rows have the same columns. Integer values are counts."""
    columns = list(next(iter(rows.values())))
    table = Table("data source", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for source, numbers in rows.items():
        cells = [_format_number(numbers[column]) for column in columns]
        table.add_row(Text(source), *cells)
    console.print("", table)


def _format_number(number: float) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    if not math.isfinite(number):
        return "-"
    return compact(number)


def print_texts(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text below the given column headings."""
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print("", table)
