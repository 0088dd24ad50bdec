"""Loads datasets from files, folders and the Hub, and blends several datasets into one."""

import glob
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, Features, load_dataset_builder, load_from_disk

from openrlhf.config.flags import dataset_parts, items
from openrlhf.data.errors import DataError
from openrlhf.data.rows import number_rows
from openrlhf.data.text_files import ANY, NULL, read_as_written, without_added_nulls
from openrlhf.reporting import notice

TEXT_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}
FORMATS = {**TEXT_FORMATS, ".parquet": "parquet", ".arrow": "arrow"}
SAVED = ("state.json", "dataset_dict.json")  # files written by save_to_disk
Table = Dataset  # rows that have not been tokenized
ALL_ROWS = 10**8
SPLIT_FLAGS = "--data.dataset_split, --data.prompt_split or --eval.split"


def load_datasets(
    spec: str, *, split: str, probs: str | None = None, max_samples: int, seed: int
) -> Dataset:
    """Return the split `split` of the comma-separated datasets in `spec`, as one dataset.

    The result has at most `max_samples` rows, and at most `max_samples` rows are read from each
    item. An item of `spec` is a file (.json, .jsonl, .csv, .tsv, .parquet or .arrow; the first four
    may be gzipped), a folder of these files, a folder written by `save_to_disk`, or a Hub name.
    `item@folder` selects a subfolder of the item. Without `probs`, the items are concatenated. With
    `probs`, rows are drawn from the items with these probabilities until every row has been drawn.
    Values are not converted: every CSV cell is text (007 stays 007), and an empty cell is null. The
    columns `errors.SOURCE` and `errors.ROW` are added.

    Raises DataError if an item cannot be read, lacks the split or has no rows, or if the items
    cannot be blended.
    """
    names = items(spec)
    parts = [_load_one(name, split, max_samples) for name in names]
    blend = parts[0]
    if len(parts) > 1:
        blend = _blend(parts, names, probs, max_samples, seed)
    return blend.select(range(min(max_samples, len(blend))))


def key_columns(data: Any) -> list[str]:
    """Return the columns named by the `*_key` flags of a config section."""
    return [column for flag, column in vars(data).items() if flag.endswith("_key") and column]


def _blend(
    parts: list[Dataset], names: list[str], probs: str | None, max_samples: int, seed: int
) -> Dataset:
    """Return the rows of all parts, concatenated or sampled with the given probabilities."""
    parts = _with_common_types(parts)
    given = list(map(float, items(probs)))
    if not given:
        return datasets.concatenate_datasets(parts)
    total = math.fsum(given)
    weights = [number / total for number in given]  # 0.333,0.333,0.333 stands for one third each
    _report_repeats(names, weights, list(map(len, parts)), max_samples)
    return datasets.interleave_datasets(
        parts, weights, seed=seed, stopping_strategy="all_exhausted"
    )


def _report_repeats(
    names: list[str], weights: list[float], rows: list[int], max_samples: int
) -> None:
    """Report the items whose rows are each drawn at least 1.5 times on average.

    Drawing stops when every item's rows have been drawn.
    """
    exhausted = max(count / weight for count, weight in zip(rows, weights, strict=True))
    for name, weight, count in zip(names, weights, rows, strict=True):
        times = weight * min(exhausted, max_samples) / count
        if times >= 1.5:
            notice(
                f"Each of the {count} rows of {name} is drawn about {times:.1f} times: "
                f"its probability is {weight:.3g}."
            )


def _with_common_types(parts: list[Dataset]) -> list[Dataset]:
    """Store columns whose types differ between the parts as JSON columns with mixed values."""
    types: dict[str, Any] = {}
    mixed: set[str] = set()
    for part in parts:
        for name, type_ in part.features.items():
            if type_ != NULL and types.setdefault(name, type_) != type_:
                mixed.add(name)
    return [_store_as_json(part, mixed) for part in parts]


def _store_as_json(part: Dataset, columns: Collection[str]) -> Dataset:
    types = part.features
    changed = [name for name in columns if name in types and types[name] != ANY]
    if not changed:
        return part

    def stored(row: dict[str, Any]) -> dict[str, str | None]:
        texts: dict[str, str | None] = {}
        for name in changed:
            texts[name] = ANY.encode_example(without_added_nulls(row[name], types[name]))
        return texts

    features = Features(types | dict.fromkeys(changed, ANY))
    return part.map(stored, features=features, keep_in_memory=True, load_from_cache_file=False)


def _load_one(item: str, split: str, max_samples: int) -> Dataset:
    """Load at most `max_samples` rows of an item. Raises DataError if the item cannot be read."""
    path, folder = dataset_parts(item)
    try:
        loaded = _read(path, folder)
    except Exception as error:  # the datasets library raises many error types
        for cause in _causes(error):
            if isinstance(cause, DataError):
                raise cause from error
        raise DataError(_explain(item, path, error)) from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            known = ", ".join(map(repr, map(str, loaded)))
            raise DataError(
                f"{item} has no split {split!r}; it has {known}. Set {SPLIT_FLAGS} to one of "
                "these splits."
            )
        loaded = loaded[split]
    if not len(loaded):
        raise DataError(f"{item} has no rows in split {split!r}.")
    return number_rows(loaded.select(range(min(max_samples, len(loaded)))), item)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that caused it, with the root cause last."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return causes


def _read(path: str, folder: str) -> Dataset | DatasetDict:
    """Read a file, a folder or a Hub dataset."""
    name = path.lower().removesuffix(".gz")
    extension = os.path.splitext(name)[1]
    if extension in (FORMATS if path.lower() == name else TEXT_FORMATS):
        options: dict[str, Any] = {}
        if extension == ".tsv":
            options["sep"] = "\t"
        builder = load_dataset_builder(FORMATS[extension], data_files=glob.escape(path), **options)
        # The datasets library gives this name to the only split of a single file.
        return read_as_written(builder)["train"]
    if os.path.isdir(path):
        inner = Path(path, folder)
        if any((inner / name).is_file() for name in SAVED):
            return load_from_disk(str(inner))
    elif os.path.isfile(path):
        raise DataError(
            f"{path} has an unknown format. Convert the file to one of {', '.join(FORMATS)} "
            f"({', '.join(TEXT_FORMATS)} may be gzipped)."
        )
    return read_as_written(load_dataset_builder(path, data_dir=folder or None))


def _explain(item: str, path: str, error: Exception) -> str:
    """Explain why the datasets library could not read an item.

    For a folder, the library's error message names the file.
    """
    root = _causes(error)[-1]
    seen = f"{type(root).__name__}: {str(root).strip().rstrip('.')}"
    if "scripts are no longer supported" in seen:
        return (
            f"{item} needs a Python loading script, and dataset scripts are not run. Pass a "
            "converted copy: parquet or JSON files, or a folder written by save_to_disk()."
        )
    # The library's errors for an empty file, an empty saved dataset and a file without rows.
    if isinstance(root, StopIteration | IndexError) or "corresponds to no data" in seen:
        return f"{item} has no rows."
    if os.path.exists(path):
        return f"{item} could not be read: {seen}."
    return (
        f"{item} could not be loaded from the hub (no file or folder with this name exists in "
        f"{os.getcwd()}): {seen}. To read a folder of a hub dataset, pass owner/name@folder."
    )
