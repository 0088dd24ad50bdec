"""Dataset specs to one blended dataset: files, folders, hub names, splits, probabilities."""

from __future__ import annotations

import glob
import math
import os
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    Json,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_from_disk,
)

from openrlhf.data.errors import SOURCE, DataError, looks_like_path
from openrlhf.data.faults import explain
from openrlhf.data.rows import number_rows

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
GZIPPED = (".json.gz", ".jsonl.gz", ".csv.gz")
SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk writes
Table = Dataset  # rows, not yet tokenised
SPLIT_FLAGS = "--data.dataset_split, --data.prompt_split or --eval.split"


def load_datasets(spec: str, *, split: str, probs: str | None = None, max_samples: int, seed: int) -> Dataset:
    """The datasets of a comma list, `split` of each, as one of at most `max_samples` rows.

    An item is a .json, .jsonl, .csv, .parquet or .arrow file (the first three also gzipped), a
    folder of such files, a folder written by `save_to_disk`, or a hub name; `item@folder` takes the
    data in that folder of it. Each item is cut to `max_samples` rows. Without `probs` they follow
    each other; with it rows are drawn from them with these probabilities until every row was used.
    Two more columns say where a row came from (`errors.SOURCE`, `errors.ROW`). Raises DataError for
    whatever is wrong with the spec or what it names.
    """
    items = [item.strip() for item in spec.split(",") if item.strip()]
    if not items:
        raise DataError("No dataset is named: set --data.dataset (for RL --data.prompt_dataset).")
    if max_samples < 1:
        raise DataError(f"--data.max_samples is {max_samples}; it must be at least 1.")
    shares = parse_probs(probs, count=len(items)) if probs else None
    parts = [_load_one(item, split, max_samples) for item in items]
    blend = _blend(parts, shares, seed) if len(parts) > 1 else parts[0]
    return blend.select(range(min(max_samples, len(blend))))


def parse_probs(probs: str, *, count: int) -> list[float]:
    """Mixing probabilities of `count` datasets, scaled to sum to 1 exactly; DataError otherwise."""
    said = f"--data.dataset_probs {probs!r}"
    try:
        shares = [float(share) for share in probs.split(",")]
    except ValueError as error:
        raise DataError(f"{said} must be numbers with commas between them: {error}.") from error
    if len(shares) != count:
        raise DataError(f"{said} has {len(shares)} numbers for {count} datasets.")
    if not all(math.isfinite(share) and share > 0 for share in shares):
        raise DataError(f"{said}: every probability must be a number above 0.")
    total = math.fsum(shares)
    if not math.isclose(total, 1.0, abs_tol=2e-3):  # 0.333,0.333,0.333 is meant as thirds
        raise DataError(f"{said} sums to {total:g}; probabilities sum to 1.")
    return [share / total for share in shares]


def _blend(parts: list[Dataset], shares: list[float] | None, seed: int) -> Dataset:
    parts = [_with_short_strings(part) for part in parts]
    try:
        if shares is None:
            return concatenate_datasets(parts)
        return interleave_datasets(parts, shares, seed=seed, stopping_strategy="all_exhausted")
    except ValueError as error:
        raise DataError(_conflict(parts) or f"The datasets cannot be blended: {error}.") from error


def _with_short_strings(part: Dataset) -> Dataset:
    """CSV files give 64-bit strings and JSON files 32-bit ones, which do not concatenate."""
    wide = [name for name, type_ in part.features.items() if type_ == Value("large_string")]
    short = Features(part.features | dict.fromkeys(wide, Value("string")))
    return part.cast(short) if wide else part


def _conflict(parts: list[Dataset]) -> str | None:
    seen: dict[str, tuple[Any, str]] = {}
    for part in parts:
        source = part[0][SOURCE]
        for column, type_ in part.features.items():
            other, first = seen.setdefault(column, (type_, source))
            if other != type_:
                return (
                    f"Column {column!r} is {other} in {first}, but {type_} in {source}. Columns of "
                    "the same name need the same type to be blended: convert or rename one."
                )
    return None


def _load_one(item: str, split: str, max_samples: int) -> Dataset:
    path, _, folder = (item, "", "") if os.path.exists(item) else item.partition("@")
    path = os.path.expanduser(path)
    try:
        loaded = _read(path, folder or None)
    except DataError:
        raise
    except Exception as error:  # the datasets library raises many kinds
        raise DataError(explain(item, path, error)) from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            there = ", ".join(repr(str(name)) for name in loaded)
            raise DataError(f"{item} has no split {split!r}; it has {there}. Set {SPLIT_FLAGS} to one of them.")
        loaded = loaded[split]
    if not len(loaded):
        raise DataError(f"{item} has no rows in split {split!r}.")
    return number_rows(loaded.select(range(min(max_samples, len(loaded)))), item)


def _read(path: str, folder: str | None) -> Dataset | DatasetDict:
    _refuse_script(path)
    extension = os.path.splitext(path.removesuffix(".gz"))[1].lower()
    if extension in FORMATS and (not path.endswith(".gz") or path.lower().endswith(GZIPPED)):
        return _read_file(path, FORMATS[extension])
    if os.path.isdir(path):
        inner = os.path.join(path, folder or "")
        if any(os.path.isfile(os.path.join(inner, name)) for name in SAVED):
            return load_from_disk(inner)
        return load_dataset(path, data_dir=folder)
    if os.path.isfile(path):
        known = ", ".join([*FORMATS, *GZIPPED])
        raise DataError(f"{path} is not of a known kind: {known}. Convert it to one of them.")
    if looks_like_path(path):
        raise DataError(f"There is no file or folder {path!r} (seen from {os.getcwd()}).")
    return load_dataset(path, data_dir=folder)


def _refuse_script(path: str) -> None:
    script = os.path.join(path, os.path.basename(os.path.normpath(path)) + ".py")
    if path.endswith(".py") or os.path.isfile(script):
        raise DataError(
            f"{path} is a Python loading script, and dataset scripts are not run. Run it where it "
            "still loads, write the result with to_parquet() or save_to_disk(), and name that."
        )


def _read_file(path: str, file_format: str) -> DatasetDict:
    if "://" not in path and not glob.glob(path):
        raise DataError(f"There is no file {path!r} (seen from {os.getcwd()}).")
    loaded = load_dataset(file_format, data_files=path)
    features = next(iter(loaded.values())).features
    dates = [
        name for name, type_ in features.items() if isinstance(type_, Value) and type_.dtype.startswith("timestamp")
    ]
    if file_format == "json" and dates:  # strings that look like dates: keep them strings
        as_written = Features(features | dict.fromkeys(dates, Json()))
        loaded = load_dataset(file_format, data_files=path, features=as_written)
    return loaded
