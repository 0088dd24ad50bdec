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


def origin_of(row: Mapping[str, Any]) -> str:
    """Return the dataset and the row number (from 1) of a row as text."""
    return f"{row[SOURCE]}, row {row[ROW]}"


def row_error(row: Mapping[str, Any], column: str, problem: str) -> DataError:
    """Return an error with the dataset, the row (from 1), the column, and then `problem`."""
    return DataError(f"{origin_of(row)}, column {column!r}: {problem}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the string in a column of a row. Raises DataError if the value is not a string."""
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
    """Raise DataError if flags name columns that the dataset does not have.

    `needed` maps flags to column names.
    """
    columns: list[str] = rows.column_names
    problems: list[str] = []
    for flag, column in needed.items():
        if column is not None and column not in columns:
            fix = f"Set {flag} to one of these columns."
            if len(rows) == 1:
                fix = "If its only row contains the list of rows, write this list to its own file."
            for name in columns:
                if name.strip().lower() == column.strip().lower():
                    fix = (
                        f"{name!r} differs only in spaces or capitals: rename it, or pass "
                        f"{flag} {shlex.quote(name)}."
                    )
            problems.append(
                f"{source_of(rows)} has no column {column!r}, which {flag} names. "
                f"It has {list_columns(columns)}. {fix}"
            )
    if problems:
        raise DataError("\n".join(problems))
