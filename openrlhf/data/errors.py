"""Errors about a user's data: the place, the value seen, the change to make.

Needs no heavy library.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.config.flags import UserError

# Columns with the origin of a row, which survive blending, shuffling and selecting.
SOURCE = "__dataset__"
ROW = "__row__"
MALFORMED = "__malformed__"  # a column with the mistake in a row

KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class DataError(UserError, ValueError):
    """A user's mistake in data, tokenizer or template.

    The message names the place, and the change to make.
    """


def kind(value: Any) -> str:
    """Return the kind of a value in the words of JSON: `a list`, `null`."""
    if value is None:
        return "null"
    return KINDS.get(type(value), type(value).__name__)


def row_error(row: Mapping[str, Any], column: str, problem: str) -> DataError:
    """Return an error that names dataset, row (from 1) and column of a value before `problem`."""
    return DataError(f"{row[SOURCE]}, row {row[ROW]}, column {column!r}: {problem}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the string in a column of a row. Raises DataError for any other value."""
    value = row[column]
    if isinstance(value, str):
        return value
    hint = "."
    if isinstance(value, list):
        hint = ". For chat messages pass --data.apply_chat_template."
    elif value is None:
        hint = ": the value is empty, or that dataset lacks the column."
    raise row_error(row, column, f"is {kind(value)}, not a string{hint}")


def list_columns(columns: Sequence[str]) -> str:
    """Return the quoted names of a dataset's own columns, separated by commas."""
    return ", ".join(repr(name) for name in columns if name not in (SOURCE, ROW))


def source_of(rows: Any) -> str:
    """Return the name of the file or dataset that the first row of a dataset came from."""
    if SOURCE not in rows.column_names:
        return "The dataset"
    return rows[SOURCE][0]


def check_columns(rows: Any, needed: Mapping[str, str | None]) -> None:
    """Raise DataError for a flag that names a missing column of a dataset.

    `needed` maps flags to columns.
    """
    columns: list[str] = rows.column_names
    for flag, column in needed.items():
        if column is not None and column not in columns:
            raise DataError(
                f"{source_of(rows)} has no column {column!r}, which {flag} names. "
                f"It has {list_columns(columns)}: {_fix_of_column(rows, flag, column)}."
            )


def _fix_of_column(rows: Any, flag: str, column: str) -> str:
    """Return what to do about a missing column, naming a column with almost the same name."""
    for name in rows.column_names:
        if name.strip().lower() == column.strip().lower():
            return (
                f"{name!r} differs only in spaces or capitals. "
                f"Rename it to {column!r}, or pass {flag} {shlex.quote(name)}"
            )
    parent = _parent_of_rows(rows)
    if parent:
        return (
            f"the rows are one level down, in the list under {parent!r}. "
            "Write that list to a separate file"
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
