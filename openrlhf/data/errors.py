"""Errors and notices about a user's data: where it is, what was seen, what to change. Needs no heavy library."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Columns that say where a row came from; they survive blending, shuffling and selecting.
SOURCE, ROW = "__dataset__", "__row__"

KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class DataError(ValueError):
    """A user's mistake in data, tokenizer or template: where it is and what to change."""


def notice(sentence: str) -> None:
    """Print what the user may want to know, in the first process of a launcher only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[notice] {sentence}", file=sys.stderr)


def kind(value: Any) -> str:
    """What a value is, in the words of JSON: `a list`, `null`."""
    return KINDS.get(type(value), type(value).__name__)


def row_error(row: Mapping[str, Any], column: str, problem: str) -> DataError:
    """`problem` of a row's value, after its dataset, row number (from 0) and column."""
    return DataError(f"{row[SOURCE]}, row {row[ROW]}, column {column!r}: {problem}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """A row's string. Raises DataError for anything else."""
    value = row[column]
    match value:
        case str():
            return value
        case None:
            hint = "; it is empty there, or the column is missing from that dataset."
        case list():
            hint = ". For chat messages pass --data.apply_chat_template."
        case _:
            hint = "."
    raise row_error(row, column, f"is {kind(value)}, not a string{hint}")


def check_columns(columns: Sequence[str], needed: Mapping[str, str | None]) -> None:
    """Raises DataError for a flag that names a missing column; `needed` maps flags to columns."""
    for flag, column in needed.items():
        if column is not None and column not in columns:
            there = ", ".join(repr(name) for name in columns if name not in (SOURCE, ROW))
            raise DataError(
                f"The dataset has no column {column!r}, which {flag} names. It has {there}: set {flag} to one of them."
            )
