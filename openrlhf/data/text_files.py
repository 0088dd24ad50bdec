"""CSV and JSON readers that keep every value unchanged.

The readers of the datasets library infer types from a block of rows: they turn 00109 into a number,
an extra field into an index, a string that looks like a date into a timestamp, and a missing key
into a null. This module's readers replace the library's readers; the library still handles files,
splits and caching.
"""

import codecs
import csv
import io
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, islice
from typing import IO, Any, NamedTuple

import datasets
import pyarrow as pa
from datasets import DatasetDict, Features, LargeList, List, Value
from datasets.builder import Key
from datasets.features.features import register_feature
from datasets.packaged_modules.csv.csv import Csv, CsvConfig
from datasets.packaged_modules.json.json import Json, JsonConfig
from datasets.utils.file_utils import xopen

from openrlhf.data.errors import DataError, kind

# Version of the rows that these readers produce. Cached rows from other versions are not used.
VERSION = "1"
BATCH_ROWS = 1000  # rows are converted to Arrow in batches, which is much faster
NOT_UTF8 = "is not UTF-8 text. Save the file as UTF-8 (Excel calls this format CSV UTF-8)"
SEPARATORS = (",", ";", "\t")
MAX_CELL_CHARACTERS = 2**31 - 1
OPENINGS = ("{", "[", ",", ":")  # line endings after which a JSON value continues

# A column type: a `Value`, a `List`, a dictionary of a struct's fields, `AsWritten`, …
Feature = Any
Row = dict[str, Any]
Rows = Iterator[Row]


def read_as_written(builder: datasets.DatasetBuilder) -> DatasetDict:
    """Read the files that a dataset builder has found.

    The readers of this module handle CSV and JSON files. The datasets library handles other
    formats, and JSON files whose types are declared in a dataset card.
    """
    config: Any = builder.config
    reader = None
    options: dict[str, Any] = {}
    if isinstance(builder, Csv):
        reader = CsvFiles
        options["sep"] = config.delimiter or config.sep
    elif isinstance(builder, Json):
        has_options = config.field is not None or config.encoding != "utf-8"
        if builder.info.features is None and not has_options:
            reader = JsonFiles
    if reader is not None:
        builder = reader(
            dataset_name=builder.dataset_name,
            config_name=config.name,
            hash=VERSION,
            base_path=builder.base_path,
            token=builder.token,
            repo_id=builder.repo_id,
            data_files=config.data_files,
            storage_options=builder.storage_options,
            **options,
        )
    builder.download_and_prepare()
    read: Any = builder.as_dataset()
    return read


@dataclass(repr=False)
class AsWritten:
    """A column type for arbitrary JSON values.

    Values are stored as JSON text, so they are read back unchanged.
    """

    dtype = "string"
    pa_type = pa.string()
    # The datasets library looks up the class by this name.
    _type: str = field(default="AsWritten", init=False)

    def __call__(self) -> pa.DataType:
        return self.pa_type

    def encode_example(self, value: Any) -> str | None:
        """Return the text to store for a value. Null is stored as null."""
        if value is None:
            return None
        return json.dumps(value)

    def decode_example(self, stored: str | None, token_per_repo_id: object = None) -> Any:
        """Return the value for a stored text."""
        if stored is None:
            return None
        return json.loads(stored)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library warns that registering types is experimental
    register_feature(AsWritten, "AsWritten")


def without_added_nulls(value: Any, feature: Feature) -> Any:
    """Return a value with the null fields of structs removed.

    Arrow adds a null field if another row has the field. Nulls in lists or in `AsWritten` columns
    come from the user's data and are kept.
    """
    if isinstance(feature, List | LargeList) and isinstance(value, list):
        return [without_added_nulls(part, feature.feature) for part in value]
    if isinstance(feature, dict) and isinstance(value, dict):
        kept = {}
        for name, part in value.items():
            if part is not None:
                kept[name] = without_added_nulls(part, feature[name])
        return kept
    return value


class TextFile(NamedTuple):
    """A file to read, with the name to show in error messages."""

    path: str
    name: str


class _TextFiles(datasets.ArrowBasedBuilder, ABC):
    """Base class of the readers, which use the library's splits and cache."""

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        dl_manager.download_config.extract_on_the_fly = True
        found: Any = self.config.data_files
        all_files: list[TextFile] = []
        splits: list[datasets.SplitGenerator] = []
        for split, names in found.items():
            opened: Any = dl_manager.extract(dl_manager.download(list(names)))
            files: list[TextFile] = []
            for name, inner in zip(names, opened, strict=True):
                files += [TextFile(path, name) for path in dl_manager.iter_files([inner])]
            all_files += files
            options: Any = {"files": files}
            splits.append(datasets.SplitGenerator(name=split, gen_kwargs=options))
        features = self._features(all_files)
        if not features:
            raise DataError(f"{', '.join(file.name for file in all_files)} has no rows.")
        self.info.features = features
        return splits

    # The datasets library calls both methods with the keyword arguments of a split.
    def _generate_shards(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, files: list[TextFile]
    ) -> Iterator[str]:
        for file in files:
            yield file.name

    def _generate_tables(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, files: list[TextFile]
    ) -> Iterator[tuple[Key, pa.Table]]:
        features: Any = self.info.features
        yield Key(0, 0), _table([], features)  # keeps the columns of a file without rows
        for shard, file in enumerate(files):
            rows = self._rows(file)
            number = 1
            while batch := list(islice(rows, BATCH_ROWS)):
                yield Key(shard, number), _table(batch, features)
                number += 1

    def _features(self, files: list[TextFile]) -> Features:
        """Return the column types over all files."""
        columns: dict[str, Feature] = {}
        for file in files:
            for row in self._rows(file):
                for column, value in row.items():
                    before = columns.get(column, NULL)
                    if before is not ANY:
                        columns[column] = _common(before, _type_of(value))
        return Features(columns)

    def _rows(self, file: TextFile) -> Rows:
        opened: Any = xopen(file.path, "rb")
        with opened:
            yield from self._read(opened, file.name)

    @abstractmethod
    def _read(self, file: IO[bytes], name: str) -> Rows:
        """Yield the rows of an open file."""


def _table(rows: list[Row], features: Features) -> pa.Table:
    """Convert rows to a table with the columns in `features`."""
    columns: dict[str, list[Any]] = {}
    for column, feature in features.items():
        values = [row.get(column) for row in rows]
        if isinstance(feature, AsWritten):
            values = [feature.encode_example(value) for value in values]
        columns[column] = values
    return pa.Table.from_pydict(columns, schema=features.arrow_schema)


# ---- CSV


class CsvFiles(_TextFiles):
    """Reader for CSV files, in which every row must have as many fields as the header.

    Every cell is text; an empty cell is null.
    """

    BUILDER_CONFIG_CLASS = CsvConfig

    def _features(self, files: list[TextFile]) -> Features:
        """Return a text type for every column, even if all its cells are empty."""
        return Features(dict.fromkeys(super()._features(files), Value("string")))

    def _read(self, file: IO[bytes], name: str) -> Rows:
        config: Any = self.config
        records = csv_records(file, name, config.delimiter or config.sep)
        _, header = next(records, NO_HEADER)
        for line, fields in records:
            if len(fields) != len(header):
                raise DataError(
                    f"{name}, line {line}: the row has {len(fields)} fields, but the header has "
                    f"{len(header)} ({', '.join(header)}). Put double quotes around fields that "
                    "contain the separator or a line break."
                )
            yield {column: cell or None for column, cell in zip(header, fields, strict=True)}


NO_HEADER: tuple[int, list[str]] = (0, [])  # header of an empty file


def csv_records(file: IO[bytes], name: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of a CSV file with their line numbers: the header, then the rows.

    Empty lines are skipped. If the header does not contain `separator`, the separator is the first
    of comma, semicolon and tab that the header contains. Unnamed columns are named as in pandas.
    Raises a DataError with the line number for text that is not UTF-8, unmatched quotes, and
    duplicate column names.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    lines = _csv_lines(file, name)
    first = next(filter(str.strip, lines), "")
    if separator not in first:
        separator = next(filter(first.__contains__, SEPARATORS), separator)
    reader = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    line = 1
    header: list[str] = []
    try:
        for fields in reader:
            if fields and not header:
                for place, column in enumerate(fields):
                    header.append(column if column.strip() else f"Unnamed: {place}")
                if len(set(header)) < len(header):
                    raise DataError(
                        f"{name}, line {line}: the header has duplicate column names: "
                        f"{header}. Give each column a unique name."
                    )
                fields = header
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name}, line {line}: unmatched quotes in this row ({error}). Put double quotes "
            'around fields that contain a double quote, and double them: "He said ""yes""".'
        ) from error


def _csv_lines(file: IO[bytes], name: str) -> Iterator[str]:
    """Yield the decoded lines of a CSV file."""
    for number, line in enumerate(file, 1):
        text = _decoded(line, name, number)
        if number == 1:
            text = text.removeprefix("\ufeff")  # byte order mark written by Excel
        # Files from old Macs use carriage returns as line endings.
        yield from io.StringIO(text, newline="")


# ---- JSON


class JsonFiles(_TextFiles):
    """Reader for JSON files: one value per line, a single array, or concatenated values.

    Columns whose values all have the same simple type get that type. Other columns are `AsWritten`.
    """

    BUILDER_CONFIG_CLASS = JsonConfig

    def _read(self, file: IO[bytes], name: str) -> Rows:
        return json_rows(file, name)


NULL = Value("null")
ANY = AsWritten()
SIMPLE: dict[type, Feature] = {
    type(None): NULL,
    str: Value("string"),
    bool: Value("bool"),
    int: Value("int64"),
    float: Value("float64"),
}


def _type_of(value: Any) -> Feature:
    """Return the column type for a JSON value."""
    if isinstance(value, list):
        return _list_of(reduce(_common, map(_type_of, value), NULL))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return ANY
    return SIMPLE.get(type(value), ANY)


def _list_of(inner: Feature) -> Feature:
    """Return the type for lists with items of this type."""
    return ANY if inner is ANY else List(inner)


def _common(a: Feature, b: Feature) -> Feature:
    """Return the column type that can hold values of both types."""
    if b is NULL or a is b:
        return a
    if a is NULL:
        return b
    if isinstance(a, List) and isinstance(b, List):
        return _list_of(_common(a.feature, b.feature))
    return ANY


def json_rows(file: IO[bytes], name: str) -> Rows:
    """Yield the objects of a JSON file.

    A string becomes a row with the column `text`. Raises a DataError with the line number for text
    that is not UTF-8, invalid JSON, duplicate keys, unpaired surrogates, and values that are not
    rows.
    """
    is_first = True
    for number, line in enumerate(file, 1):
        text = _decoded(line.removeprefix(codecs.BOM_UTF8), name, number)
        if not text.strip():
            continue
        if is_first and (text.lstrip().startswith("[") or text.rstrip().endswith(OPENINGS)):
            skipped = "\n" * (number - 1)
            rest = _decoded(file.read(), name, number + 1)
            yield from _whole_file(skipped + text + rest, name)
            return
        is_first = False
        try:
            value = DECODER.decode(text)
        except ValueError as error:
            raise _broken(error, name, number) from error
        yield _row(value, f"{name}, line {number}", escaped=_escapes_surrogates(text))


def _whole_file(text: str, name: str) -> Rows:
    """Yield the rows of a text that is a single array or has values spanning several lines."""
    escaped = _escapes_surrogates(text)
    number = 1
    place = 0
    while start := NOT_SPACE.search(text, place):
        try:
            value, place = DECODER.raw_decode(text, start.start())
        except ValueError as error:
            place = getattr(error, "pos", start.start())
            raise _broken(error, name, text.count("\n", 0, place) + 1) from error
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            yield _row(row, f"{name}, row {number}", escaped=escaped)
            number += 1


def _decoded(text: bytes, name: str, line: int) -> str:
    """Decode a part of a file that starts at `line`."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line += text.count(b"\n", 0, error.start)
        raise DataError(f"{name}, line {line} {NOT_UTF8}.") from error


def _broken(error: ValueError, name: str, line: int) -> DataError:
    """Return the error for a text that is not valid JSON."""
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"invalid JSON at column {error.colno}: {error.msg.removesuffix(' at')}"
    return DataError(f"{name}, line {line}: {reason}.")


def _object_of(pairs: list[tuple[str, Any]]) -> Row:
    """Build a JSON object from its pairs. Raises ValueError for a duplicate key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has a key twice: {repeated!r}")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)
NOT_SPACE = re.compile(r"\S")


def _escapes_surrogates(text: str) -> bool:
    return "\\ud" in text.lower()


def _row(value: Any, place: str, *, escaped: bool) -> Row:
    """Convert a JSON value to a row.

    `escaped` means that the file contains escaped surrogates, so the row may contain an unpaired
    one.
    """
    row = value
    if isinstance(value, str):
        row = {"text": value}
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row is {kind(row)}, not an object with columns.")
    if escaped:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: a text contains an unpaired surrogate, {error.object[error.start]!r}."
            ) from error
    return row
