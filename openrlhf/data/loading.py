"""Dataset specs to one blended dataset: files, folders, hub names, splits, probabilities."""

import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, Features, Json, Value, load_dataset, load_from_disk

from openrlhf.data.errors import DataError, notice
from openrlhf.data.rows import number_rows

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
GZIPPED = (".json.gz", ".jsonl.gz", ".csv.gz")
SAVED = ("state.json", "dataset_dict.json")  # files that save_to_disk writes
Table = Dataset  # rows, not yet tokenized
ALL_ROWS = 10**8
SPLIT_FLAGS = "--data.dataset_split, --data.prompt_split or --eval.split"


def load_datasets(
    spec: str, *, split: str, probs: str | None = None, max_samples: int, seed: int, text: Collection[str] = ()
) -> Dataset:
    """The datasets of a comma list, `split` of each, as one dataset of at most `max_samples` rows.

    An item is a .json, .jsonl, .csv, .parquet or .arrow file (the first three also gzipped), a folder of such files, a
    folder written by `save_to_disk`, or a hub name. `item@folder` reads the folder `folder` of the item. Each item is
    cut to `max_samples` rows. Without `probs` the items follow each other. With `probs`, which the flags have checked,
    rows are drawn from the items with these probabilities until every row was drawn. Columns named in `text` are read
    as text from CSV files too, so that 007 stays 007. Two more columns give the origin of a row (`errors.SOURCE`,
    `errors.ROW`).

    Raises DataError if an item cannot be read, has no such split or has no rows, or if the items cannot be blended.
    """
    items = [item.strip() for item in spec.split(",") if item.strip()]
    parts = [_load_one(item, split, max_samples, text) for item in items]
    blend = _blend(parts, items, probs, max_samples, seed) if len(parts) > 1 else parts[0]
    return blend.select(range(min(max_samples, len(blend))))


def key_columns(data: Any) -> list[str]:
    """The columns that the `*_key` flags of a section name."""
    return [column for flag, column in vars(data).items() if flag.endswith("_key") and column]


def _blend(parts: list[Dataset], items: list[str], probs: str | None, max_samples: int, seed: int) -> Dataset:
    parts = [_with_short_strings(part) for part in parts]
    try:
        if probs is None:
            return datasets.concatenate_datasets(parts)
        given = [float(number) for number in probs.split(",")]
        weights = [number / math.fsum(given) for number in given]  # 0.333,0.333,0.333 means thirds
        _announce_repeats(items, weights, [len(part) for part in parts], max_samples)
        return datasets.interleave_datasets(parts, weights, seed=seed, stopping_strategy="all_exhausted")
    except ValueError as error:
        problem = f"{', '.join(items)} cannot be blended: {error}. Columns of the same name need the same type."
        raise DataError(problem) from error


def _announce_repeats(items: list[str], weights: list[float], rows: list[int], max_samples: int) -> None:
    """Name the items that are drawn more than once on average: drawing ends when the last item is used up."""
    drawn = min(max(count / weight for count, weight in zip(rows, weights, strict=True)), max_samples)
    for item, weight, count in zip(items, weights, rows, strict=True):
        if (times := weight * drawn / count) >= 1.5:
            notice(
                f"Each of the {count} rows of {item} is drawn about {times:.1f} times: its probability is {weight:.3g}."
            )


def _with_short_strings(part: Dataset) -> Dataset:
    """Strings of CSV files (64-bit) as strings of JSON files (32-bit), because the two types do not concatenate."""
    wide = [name for name, type_ in part.features.items() if type_ == Value("large_string")]
    short = Features(part.features | dict.fromkeys(wide, Value("string")))
    return part.cast(short) if wide else part


def _load_one(item: str, split: str, max_samples: int, text: Collection[str]) -> Dataset:
    path, _, folder = (item, "", "") if os.path.exists(item) else item.partition("@")
    try:
        loaded = _read(path, folder or None, text)
    except DataError:
        raise
    except Exception as error:  # the datasets library raises many kinds
        raise DataError(_explain(item, path, error)) from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            there = ", ".join(repr(str(name)) for name in loaded)
            raise DataError(f"{item} has no split {split!r}; it has {there}. Set {SPLIT_FLAGS} to one of them.")
        loaded = loaded[split]
    if not len(loaded):
        raise DataError(f"{item} has no rows in split {split!r}.")
    return number_rows(loaded.select(range(min(max_samples, len(loaded)))), item)


def _read(path: str, folder: str | None, text: Collection[str]) -> Dataset | DatasetDict:
    extension = os.path.splitext(path.removesuffix(".gz"))[1].lower()
    as_text: dict[str, Any] = {"converters": dict.fromkeys(text, str), "keep_default_na": False, "na_values": [""]}
    if extension in FORMATS and (not path.endswith(".gz") or path.lower().endswith(GZIPPED)):
        return _read_file(path, FORMATS[extension], as_text if FORMATS[extension] == "csv" else {})
    if os.path.isdir(path):
        inner = Path(path, folder or "")
        if any((inner / name).is_file() for name in SAVED):
            return load_from_disk(str(inner))
        return load_dataset(path, data_dir=folder, **(as_text if any(inner.rglob("*.csv*")) else {}))
    if os.path.isfile(path):
        known = ", ".join([*FORMATS, *GZIPPED])
        raise DataError(f"{path} has an unknown format. Known are {known}: convert the file to one of them.")
    return load_dataset(path, data_dir=folder)


def _read_file(path: str, file_format: str, options: dict[str, Any]) -> Dataset:
    loaded = load_dataset(file_format, data_files=path, split="train", **options)  # the library's name for all rows
    values = {name: type_ for name, type_ in loaded.features.items() if isinstance(type_, Value)}
    dates = [name for name, value in values.items() if value.dtype.startswith("timestamp")]
    if file_format == "json" and dates:  # strings that look like dates: keep them strings
        as_written = Features(loaded.features | dict.fromkeys(dates, Json()))
        loaded = load_dataset(file_format, data_files=path, split="train", features=as_written)
    return loaded


def _explain(item: str, path: str, error: Exception) -> str:
    """Why the datasets library could not read an item. The library's error names the file of a folder."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    seen = f"{type(root).__name__}: {str(root).strip().rstrip('.')}"
    if "scripts are no longer supported" in seen:
        return (
            f"{item} is loaded by a Python script, and dataset scripts are not run. "
            "Name a converted copy: parquet or JSON files, or a folder of save_to_disk()."
        )
    # An empty file, an empty saved dataset, and a file without rows, in this order.
    if isinstance(root, StopIteration | IndexError) or "corresponds to no data" in seen:
        return f"{item} has no rows."
    if os.path.exists(path):
        return f"{item} could not be read: {seen}."
    return (
        f"{item} could not be loaded from the hub (there is no file or folder of that name in "
        f"{os.getcwd()}): {seen}. A folder of a hub dataset is named like owner/name@folder."
    )
