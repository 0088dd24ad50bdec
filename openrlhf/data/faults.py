"""What is wrong with a dataset that the datasets library could not read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path


def explain(item: str, path: str, error: Exception) -> str:
    """The error of a dataset spec's item as a sentence: which file and line, or which hub name."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    seen = f"{type(root).__name__}: {str(root).rstrip('. ')}"
    if "scripts are no longer supported" in seen:
        return (
            f"{item} is loaded by a Python script, and dataset scripts are not run. "
            "Name a converted copy: parquet or JSON files, or a folder of save_to_disk()."
        )
    local = Path(path)
    for file in [local] if local.is_file() else sorted(local.rglob("*.json*")):
        if fault := json_fault(file):
            return f"{file}, {fault}."
    # Of an empty file, of an empty saved dataset, and of a file without rows.
    if isinstance(root, StopIteration | IndexError) or "corresponds to no data" in seen:
        return f"{item} has no rows."
    if local.exists():
        return f"{item} could not be read: {seen}."
    return (
        f"{item} could not be loaded from the hub (there is no file or folder of that name in "
        f"{os.getcwd()}): {seen}. A folder of a hub dataset is named like owner/name@folder."
    )


def json_fault(file: Path) -> str | None:
    """The first fault of a .json, .jsonl or gzipped file, by line (from 1); None of other files."""
    if not {".json", ".jsonl"} & set(file.suffixes):
        return None
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as stream:
            start = stream.read(100).lstrip()
            stream.seek(0)
            if start.startswith(b"[") or start.splitlines()[:1] == [b"{"]:
                return _document_fault(stream.read())
            return _line_fault(stream)
    except OSError:  # not gzipped, not readable: the library's own message says so
        return None


def _document_fault(text: bytes) -> str | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {error.lineno} is not valid JSON: {error.msg}"
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not valid UTF-8"
    return None


def _line_fault(lines: Iterable[bytes]) -> str | None:
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line.strip() else {}
        except ValueError as error:
            return f"line {number} is not valid JSON: {error}"
        if not isinstance(value, dict):
            return f"line {number} is not a JSON object, but {str(value)[:40]!r}"
    return None
