"""Errors in the user's data, reported with location, value and fix.

This module does not import heavy libraries.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.config.flags import UserError

# Columns that record where a row came from. Blending, shuffling and selecting preserve them.
SOURCE = "__dataset__"
ROW = "__row__"
MALFORMED = "__malformed__"  # column with the error message for a malformed row

KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class DataError(UserError, ValueError):
    """An error in the user's data, tokenizer or template.

    The message states the location and the fix.
    """


def kind(value: Any) -> str:
    """Return a value's JSON type in words, such as `a list` or `null`."""
    if value is None:
        return "null"
    return KINDS.get(type(value), type(value).__name__)


def row_error(row: Mapping[str, Any], column: str, problem: str) -> DataError:
    """Return an error that names the dataset, the row (from 1) and the column before `problem`."""
    return DataError(f"{row[SOURCE]}, row {row[ROW]}, column {column!r}: {problem}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the string in a column of a row. Raises DataError if it is not a string."""
    value = row[column]
    if isinstance(value, str):
        return value
    hint = "."
    if isinstance(value, list):
        hint = ". For chat messages, pass --data.apply_chat_template."
    elif value is None:
        hint = ": the value is empty or this dataset does not have the column."
    raise row_error(row, column, f"is {kind(value)}, not a string{hint}")


def list_columns(columns: Sequence[str]) -> str:
    """Return the dataset's own column names, quoted and comma-separated."""
    return ", ".join(repr(name) for name in columns if name not in (SOURCE, ROW))


def source_of(rows: Any) -> str:
    """Return the name of the file or dataset that the first row came from."""
    if SOURCE not in rows.column_names:
        return "The dataset"
    return rows[SOURCE][0]


def check_columns(rows: Any, needed: Mapping[str, str | None]) -> None:
    """Raise DataError if a flag names a column that the dataset does not have.

    `needed` maps flags to column names.
    """
    columns: list[str] = rows.column_names
    for flag, column in needed.items():
        if column is not None and column not in columns:
            raise DataError(
                f"{source_of(rows)} has no column {column!r}, which {flag} names. "
                f"It has {list_columns(columns)}: {_fix_of_column(rows, flag, column)}."
            )


def _fix_of_column(rows: Any, flag: str, column: str) -> str:
    """Return the fix for a missing column, suggesting a column with a similar name."""
    for name in rows.column_names:
        if name.strip().lower() == column.strip().lower():
            return (
                f"{name!r} differs only in spaces or capitals. "
                f"Rename it to {column!r}, or pass {flag} {shlex.quote(name)}"
            )
    parent = _parent_of_rows(rows)
    if parent:
        return (
            f"the rows are nested one level down, in the list under {parent!r}. Write that list to "
            "a separate file"
        )
    return f"set {flag} to one of them"


def _parent_of_rows(rows: Any) -> str | None:
    """Return the column of a single row that holds a list of objects other than chat messages."""
    if len(rows) != 1:
        return None
    for name, value in rows[0].items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and not {"role", "from"} & first.keys():
            return name
    return None
