"""Rows of a dataset: their origin and their conversion to tokens."""

import fcntl
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import datasets.config
import torch.distributed as dist
import torch.utils.data
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.checks import report
from openrlhf.config.machine import usable_cores, world_size
from openrlhf.data.control_tokens import ControlTokens, check_control_tokens
from openrlhf.data.errors import MALFORMED, ROW, SOURCE, DataError
from openrlhf.data.layouts import READERS, columns_read
from openrlhf.data.lost_tools import ONLY_CALLS, check_tools
from openrlhf.data.templates import Encoded, Passage, encode
from openrlhf.data.text_files import without_added_nulls
from openrlhf.reporting import notice
from openrlhf.termination import asked

MANY_ROWS = 20_000  # larger datasets are mapped by several processes and stored on disk
MAX_MAPPING_PROCESSES = 8

Columns = dict[str, list[Any]]
Row = TypeVar("Row")  # a data class


def number_rows(dataset: Dataset, source: str = "the dataset") -> Dataset:
    """Add columns with the origin of each row, if they are missing."""
    if SOURCE in dataset.column_names:
        return dataset
    rows = len(dataset)
    # The library declares the fingerprint as a required argument, but computes it itself.
    dataset = dataset.add_column(SOURCE, [source] * rows)  # pyright: ignore[reportCallIssue]
    return dataset.add_column(ROW, list(range(1, rows + 1)))  # pyright: ignore[reportCallIssue]


Result = dict[str, Any] | str  # the columns of a row, or the reason why the row is dropped
MAX_ROWS_NAMED = 5  # malformed rows that an error message lists
STORED = {bool: Value("bool"), int: Value("int32"), float: Value("float64"), str: Value("string")}
STORED |= {list[kind]: List(value) for kind, value in STORED.items()}
# Columns in addition to the fields of a row.
NOTES = {
    MALFORMED: STORED[str],
    "dropped": STORED[str],
    "cut": STORED[bool],
    "rewritten": STORED[int],
    "unended": STORED[int],
    "control": STORED[str],
    "empty": STORED[int],
    "lost": STORED[str],
}
NO_NOTES = {"dropped": "", "cut": False, "rewritten": 0, "unended": 0, "control": ""}


class TokenizedRows(torch.utils.data.Dataset[Row], ABC):
    """The rows of a dataset as tokens, tokenized when the object is created.

    All processes of a launcher must create the object; one process per machine tokenizes. `data` is
    the section of the flags with the columns, the layout and `max_len`. `summary` counts dropped
    rows by reason.
    """

    row: ClassVar[Any]  # the data class of a row; its fields of the types in `STORED` are kept
    keys: tuple[str, ...]  # flags of --data.* that name columns
    what: ClassVar[str] = "row"  # the word for a row in messages

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any) -> None:
        """Tokenize all rows.

        Raises DataError for a missing column, for malformed rows (naming the first), and if no row
        is left.
        """
        self.tokenizer = tokenizer
        self.data = data
        used = columns_read(dataset, tokenizer, data, self.keys)
        own: dict[str, Any] = {}
        for field in fields(self.row):
            if field.type in STORED:
                own[field.name] = STORED[field.type]
        self.features = Features({**own, **NOTES})
        dataset = number_rows(dataset)
        self._types = dataset.features
        self.control = ControlTokens.of(tokenizer, in_chats=data.apply_chat_template)
        mapped = once_per_machine(
            lambda: map_rows(dataset, used, self._encoded, self.features, "Tokenizing")
        )
        _refuse_malformed(mapped)
        self._report_control_tokens(mapped, dataset)
        self._report_lost_tools(mapped, dataset)
        self.rows = self._kept(mapped)
        cut = sum(self.rows["cut"])
        if cut:
            limit = f"{data.max_len} tokens (--data.max_len)"
            self.summary += f" {cut} of the kept {self.what}s were cut to {limit}."
        self._fields = self.rows.select_columns(list(own))

    def _kept(self, mapped: Dataset) -> Dataset:
        """Return the rows that are not dropped, and count the dropped ones in `summary`."""
        reasons = mapped["dropped"][:]
        kept: list[int] = []
        counts: Counter[str] = Counter()
        for number, reason in enumerate(reasons):
            if reason:
                counts[reason] += 1
            else:
                kept.append(number)
        self.summary: str = f"{len(kept)} of {len(reasons)} {self.what}s kept"
        dropped = [f"{count} {reason}" for reason, count in sorted(counts.items())]
        if dropped:
            self.summary += f", dropped {', '.join(dropped)}"
        self.summary += "."
        if not kept:
            flags = ", ".join(f"--data.{key}" for key in self.keys)
            raise DataError(
                f"No {self.what} is left: {self.summary} Check {flags} and --data.max_len."
            )
        return mapped.select(kept)

    def _report_control_tokens(self, mapped: Dataset, dataset: Dataset) -> None:
        found = mapped["control"][:]
        if not any(found):
            return
        in_template = self.data.apply_chat_template or self.data.input_template not in (None, "{}")
        report(
            *check_control_tokens(
                found,
                what=self.what,
                first=_first_origin(found, dataset),
                rendered=not in_template,
            )
        )

    def _report_lost_tools(self, mapped: Dataset, dataset: Dataset) -> None:
        lost = mapped["lost"][:]
        if not any(lost):
            return
        report(
            *check_tools(
                lost,
                empty=sum(mapped["empty"][:]),
                what=self.what,
                first=_first_origin(lost, dataset),
                model=repr(self.tokenizer.name_or_path),
            )
        )

    @abstractmethod
    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Return the texts of a row, or the reason why the row is dropped."""

    @abstractmethod
    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return the columns of a tokenized row, or the reason why the row is dropped."""

    def _encoded(self, columns: Columns) -> Columns:
        """Convert a batch of columns to the columns of `features`.

        `dropped` contains the reason for dropping a row, and `MALFORMED` its error, if any.
        """
        rows = self._read(columns)
        texts = [attempt(self.passages, row) for row in rows]
        to_encode: list[str] = []
        for text in texts:
            if isinstance(text, list):
                to_encode += [passage.text for passage in text]
        encoded = iter(encode(self.tokenizer, to_encode))
        written: list[str] = []
        for key in self.keys:
            column = getattr(self.data, key)
            if column and key != "label_key":
                written.append(column)
        results: list[dict[str, Any]] = []
        for row, text in zip(rows, texts, strict=True):
            outcome = text  # the reason or the error, if the row has no texts
            if isinstance(text, list):
                outcome = attempt(self.columns, row, text, list(islice(encoded, len(text))))
            if isinstance(outcome, str):
                result: dict[str, Any] = {"dropped": outcome}
            else:
                result = {**NO_NOTES, **outcome}
            result |= _lost_in(text)
            result["control"] = self.control.first_in(list(map(row.get, written)))
            results.append(result)
        made: Columns = {}
        for name in self.features:
            made[name] = [result.get(name) for result in results]
        return made

    def _read(self, columns: Columns) -> list[dict[str, Any]]:
        """Return the rows of a batch of columns, converted by the reader of the layout."""
        read = READERS.get(self.data.layout, dict)
        kept: Columns = {}
        for name, values in columns.items():
            kept[name] = [without_added_nulls(value, self._types[name]) for value in values]
        rows: list[dict[str, Any]] = []
        for values in zip(*kept.values(), strict=True):
            rows.append(attempt(read, dict(zip(columns, values, strict=True))))
        return rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.row(**self._fields[index])

    def contents(self) -> Iterator[bytes]:
        """Return all rows as bytes, for hashing."""
        return contents_of(self._fields)


def _refuse_malformed(mapped: Dataset) -> None:
    """Raise DataError if there are malformed rows, naming the first."""
    malformed = list(filter(None, mapped[MALFORMED][:]))
    if not malformed:
        return
    lines = malformed[:MAX_ROWS_NAMED]
    if len(malformed) > 1:
        lines.append(f"{len(malformed)} of {len(mapped)} rows are malformed.")
    raise DataError("\n".join(lines))


def _first_origin(found: list[str | None], dataset: Dataset) -> str:
    """Return the dataset and the number of the first row in which something was found."""
    first = next(number for number, each in enumerate(found) if each)
    origin = dataset.select_columns([SOURCE, ROW])[first]
    return f"{origin[SOURCE]}, row {origin[ROW]},"


def _lost_in(text: Any) -> dict[str, Any]:
    """Return the notes about tools that the template left out of a row.

    `text` is the list of the row's passages, or the reason why the row is dropped.
    """
    if text == ONLY_CALLS:
        return {"lost": "the calls of its answer", "empty": 0}
    passages: list[Passage] = text if isinstance(text, list) else []
    lost = ""
    empty = 0
    for passage in passages:
        lost = lost or passage.lost
        empty += passage.empty
    return {"lost": lost, "empty": empty}


def attempt(step: Callable[..., Any], row: dict[str, Any], *arguments: Any) -> Any:
    """Return the result of a step for a row, or a column with the row's error.

    A row in which an earlier step found an error is returned unchanged.
    """
    if MALFORMED in row:
        return row
    try:
        return step(row, *arguments)
    except DataError as error:
        return {MALFORMED: str(error)}


def without_origin(dataset: Dataset) -> Dataset:
    """Return a dataset without the columns for the origin of its rows."""
    columns = [name for name in dataset.column_names if name not in (SOURCE, ROW)]
    return dataset.select_columns(columns)


def contents_of(dataset: Dataset) -> Iterator[bytes]:
    """Yield all values of a dataset as bytes, independent of how the dataset is stored.

    Hashing a million rows of 250 tokens takes 2 to 5 s.
    """
    batches: Any = dataset.with_format("arrow").iter(1000)
    for batch in batches:
        for column in batch.columns:
            values = column.combine_chunks()
            while hasattr(values, "value_lengths"):  # a list
                yield values.value_lengths().to_numpy(zero_copy_only=False).tobytes()
                values = values.flatten()
            array = values.to_numpy(zero_copy_only=False)
            if array.dtype == object:
                yield repr(values.to_pylist()).encode(errors="surrogatepass")
            else:
                yield array.tobytes()


def once_per_machine(prepare: Callable[[], Dataset]) -> Dataset:
    """Prepare rows in one process per machine, and memory-map their files in all its processes.

    The other processes wait for a lock, without a deadline. If the process that holds the lock
    ends, the system releases the lock and the next process prepares the rows. Raises DataError as
    `prepare` does, and if the disk is full.
    """
    if world_size() == 1 or not dist.is_initialized():
        return prepare()
    name = [f"openrlhf-rows-{uuid4()}"]
    dist.broadcast_object_list(name)
    folder = Path(tempfile.gettempdir(), name[0])
    folder.mkdir(exist_ok=True)
    rows = folder / "rows"
    with open(folder / "lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not (rows / "dataset_info.json").exists():  # the last file that is written
            try:
                prepare().save_to_disk(rows)
            except BaseException as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                raise DataError(
                    f"Rows cannot be written to {folder}: {error}. Set TMPDIR to another folder."
                ) from error
    mapped = Dataset.load_from_disk(rows)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)  # the system keeps mapped files while they are in use
    return mapped


def map_rows(
    dataset: Dataset,
    columns: list[str],
    function: Callable[[Columns], Columns],
    features: Features,
    title: str,
) -> Dataset:
    """Return the columns that `function` computes from batches of `columns` and row origins.

    Nothing is cached, because a cached result would survive a change of this code. Tables of many
    rows stay on disk while the process uses them, but their folder is deleted before this function
    returns. `dataset` is a result of `number_rows`. Raises DataError for text that is not UTF-8 and
    for a full disk, SystemExit if the process is asked to end, and every error of `function`.
    """
    dataset = dataset.select_columns(list(dict.fromkeys([*columns, SOURCE, ROW])))
    options: dict[str, Any] = {"keep_in_memory": True}
    folder = None
    if len(dataset) > MANY_ROWS:
        workers = min(MAX_MAPPING_PROCESSES, usable_cores())
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="openrlhf-rows-", dir=cache))
        options = {"cache_file_name": str(folder / "rows.arrow")}
        if workers > 1:
            options["num_proc"] = workers
        notice(f"{title} {len(dataset)} rows; processes: {workers}.")
    try:
        return dataset.map(
            function,
            batched=True,
            batch_size=500,
            remove_columns=dataset.column_names,
            features=features,
            load_from_cache_file=False,
            desc=title,
            **options,
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{_first_unreadable(dataset)} is not valid UTF-8 text.") from error
    except Exception as error:
        if asked():  # the library raises a worker timeout instead of SystemExit
            raise SystemExit(asked()) from None
        if folder and isinstance(error, OSError):
            raise DataError(
                f"Rows cannot be written to {folder}: {error}. "
                "Set HF_DATASETS_CACHE to another folder."
            ) from error
        raise
    finally:
        if folder:
            # The system keeps mapped files while they are in use.
            shutil.rmtree(folder, ignore_errors=True)


def _first_unreadable(dataset: Dataset) -> str:
    """Return the origin of the first row that is not UTF-8 text."""
    for number in range(len(dataset)):
        try:
            dataset[number]
        except UnicodeDecodeError:
            origin = dataset.select_columns([SOURCE, ROW])[number]
            return f"{origin[SOURCE]}, row {origin[ROW]}:"
    raise AssertionError("every row could be read")
