"""Tokenizes dataset rows, and keeps track of each row's origin."""

import fcntl
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from openrlhf.config.machine import usable_cores, world_size
from openrlhf.data.control_tokens import ControlTokens
from openrlhf.data.errors import MALFORMED, ROW, SOURCE, DataError, origin_of, source_of
from openrlhf.data.layouts import READERS, columns_read
from openrlhf.data.lost_tools import ONLY_CALLS
from openrlhf.data.templates import Encoded, Passage, encode
from openrlhf.data.text_files import without_added_nulls
from openrlhf.reporting import notice
from openrlhf.termination import asked

MANY_ROWS = 20_000  # larger datasets are tokenized by several processes and stored on disk
MAX_MAPPING_PROCESSES = 8

Columns = dict[str, list[Any]]
Row = TypeVar("Row")  # a data class


def number_rows(dataset: Dataset, source: str = "the dataset") -> Dataset:
    """Add columns that record each row's origin, unless they exist."""
    if SOURCE in dataset.column_names:
        return dataset
    rows = len(dataset)
    # The library's signature requires a fingerprint, but the library computes it.
    dataset = dataset.add_column(SOURCE, [source] * rows)  # pyright: ignore[reportCallIssue]
    return dataset.add_column(ROW, list(range(1, rows + 1)))  # pyright: ignore[reportCallIssue]


Result = dict[str, Any] | str  # a row's columns, or the reason for dropping the row
MAX_ROWS_NAMED = 5  # maximum number of malformed rows listed in an error message
STORED = {bool: Value("bool"), int: Value("int32"), float: Value("float64"), str: Value("string")}
STORED |= {list[kind]: List(value) for kind, value in STORED.items()}
# Bookkeeping columns, stored next to a row's own fields.
TEXTS = (MALFORMED, "dropped", "control", "lost")
COUNTS = ("cut", "rewritten", "unended", "empty")
NOTES = dict.fromkeys(TEXTS, STORED[str]) | dict.fromkeys(COUNTS, STORED[int])


class TokenizedRows(torch.utils.data.Dataset[Row], ABC):
    """A dataset's rows, tokenized when the object is created.

    Every launched process must create the object; one process per machine tokenizes. `data` is the
    config section with the columns, the layout and `max_len`. `summary` counts dropped rows by
    reason.
    """

    row: ClassVar[Any]  # dataclass of a row; its fields with types in `STORED` are stored
    keys: tuple[str, ...]  # --data.* flags that name columns
    what: ClassVar[str] = "row"  # the word for a row in messages to the user

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any) -> None:
        """Tokenize all rows.

        Raises DataError if a column is missing, if rows are malformed (the message names the first
        rows), or if all rows are dropped.
        """
        self.tokenizer = tokenizer
        self.data = data
        used = columns_read(dataset, tokenizer, data, self.keys)
        own = {field.name: STORED[field.type] for field in fields(self.row) if field.type in STORED}
        self.features = Features({**own, **NOTES})
        dataset = number_rows(dataset)
        self._types = dataset.features
        self.control = ControlTokens(tokenizer, in_chats=data.apply_chat_template)
        mapped = once_per_machine(lambda: map_rows(dataset, used, self._encoded, self.features))
        _refuse_malformed(mapped)
        self._report_notes(mapped)
        self.rows = self._kept(mapped)
        cut = sum(self.rows["cut"])
        if cut:
            limit = f"{data.max_len} tokens (--data.max_len)"
            self.summary += f" {cut} of the kept {self.what}s were truncated to {limit}."
        self._fields = self.rows.select_columns(list(own))

    def _kept(self, mapped: Dataset) -> Dataset:
        """Remove dropped rows and count them by reason in `summary`."""
        reasons = mapped["dropped"][:]
        kept = [number for number, reason in enumerate(reasons) if not reason]
        counts = Counter(filter(None, reasons))
        self.summary: str = f"{len(kept)} of {len(reasons)} {self.what}s kept"
        if counts:
            dropped = [f"{count} {reason}" for reason, count in sorted(counts.items())]
            self.summary += f", dropped {', '.join(dropped)}"
        self.summary += "."
        if not kept:
            flags = ", ".join(f"--data.{key}" for key in self.keys)
            raise DataError(
                f"All {self.what}s were dropped: {self.summary} Check {flags} and --data.max_len."
            )
        return mapped.select(kept)

    def _report_notes(self, mapped: Dataset) -> None:
        """Print notices about control tokens in the rows and about tools that a template omits."""
        rows = f"of {len(mapped)} {self.what}s"
        control = list(filter(None, mapped["control"][:]))
        in_template = self.data.apply_chat_template or self.data.input_template not in (None, "{}")
        # Without a template, most rows have control tokens if they are already rendered.
        if control and (in_template or 2 * len(control) <= len(mapped)):
            notice(
                f"{len(control)} {rows} contain control tokens, which the model reads as "
                f"boundaries between turns or texts. The first is {control[0]}. Unless this is "
                "intended, remove these tokens from the data or spell them differently."
            )
        lost = list(filter(None, mapped["lost"][:]))
        if lost:
            notice(
                f"{len(lost)} {rows} have tools or tool calls that the chat template of "
                f"{self.tokenizer.name_or_path!r} omits, so the model does not see them. The first "
                f"is {lost[0]}. Assistant turns that would be empty answers are not trained on: "
                f"{sum(mapped['empty'][:])}. Use a template that renders tools and tool_calls "
                "(--data.tokenizer_chat_template or the model's chat_template.jinja), or write the "
                "calls into the message contents."
            )

    @abstractmethod
    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Return a row's texts, or the reason for dropping the row."""

    @abstractmethod
    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return the columns of a tokenized row, or the reason for dropping it."""

    def _encoded(self, columns: Columns) -> Columns:
        """Convert a batch of dataset columns to the columns in `features`.

        The column `dropped` contains a row's drop reason, and the column `MALFORMED` contains its
        error.
        """
        rows = self._read(columns)
        texts = [attempt(self.passages, row) for row in rows]
        to_encode: list[str] = []
        for text in texts:
            if isinstance(text, list):
                to_encode += [passage.text for passage in text]
        encoded = iter(encode(self.tokenizer, to_encode))
        written = [getattr(self.data, key) for key in self.keys if key != "label_key"]
        results: list[dict[str, Any]] = []
        for row, text in zip(rows, texts, strict=True):
            outcome = text  # the drop reason or the error, unless the row has texts
            if isinstance(text, list):
                outcome = attempt(self.columns, row, text, list(islice(encoded, len(text))))
            result: dict[str, Any] = dict.fromkeys(COUNTS, 0)
            result |= {"dropped": outcome} if isinstance(outcome, str) else outcome
            passages = text if isinstance(text, list) else []
            result["empty"] = sum(passage.empty for passage in passages)
            lost = "its answer" if text == ONLY_CALLS else ""
            for passage in passages:
                lost = lost or passage.lost
            result["lost"] = lost and f"{origin_of(row)} with {lost}"
            token = self.control.first_in(list(map(row.get, written)))
            result["control"] = token and f"{origin_of(row)} with {token!r}"
            results.append(result)
        made: Columns = {}
        for name in self.features:
            made[name] = [result.get(name) for result in results]
        for name in COUNTS:
            made[name] = list(map(int, made[name]))  # Arrow columns cannot mix numbers and booleans
        return made

    def _read(self, columns: Columns) -> list[dict[str, Any]]:
        """Return the rows of a batch of columns, converted by the layout's reader."""
        read = READERS.get(self.data.layout, dict)
        rows: list[dict[str, Any]] = []
        for values in zip(*columns.values(), strict=True):
            row: dict[str, Any] = {}
            for name, value in zip(columns, values, strict=True):
                row[name] = without_added_nulls(value, self._types[name])
            rows.append(attempt(read, row))
        return rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.row(**self._fields[index])

    def contents(self) -> Iterator[bytes]:
        """Return all rows as bytes for hashing."""
        return contents_of(self._fields)


def _refuse_malformed(mapped: Dataset) -> None:
    """Raise DataError if rows are malformed, naming the first ones."""
    malformed = list(filter(None, mapped[MALFORMED][:]))
    lines = malformed[:MAX_ROWS_NAMED]
    if len(malformed) > 1:
        lines.append(f"{len(malformed)} of {len(mapped)} rows are malformed.")
    if lines:
        raise DataError("\n".join(lines))


def attempt(step: Callable[..., Any], row: dict[str, Any], *arguments: Any) -> Any:
    """Run a processing step on a row, and return its result or a column with the row's error.

    A row that failed in an earlier step is returned unchanged.
    """
    if MALFORMED in row:
        return row
    try:
        return step(row, *arguments)
    except DataError as error:
        return {MALFORMED: str(error)}


def without_origin(dataset: Dataset) -> Dataset:
    """Return the dataset without the columns that record row origins."""
    columns = [name for name in dataset.column_names if name not in (SOURCE, ROW)]
    return dataset.select_columns(columns)


def contents_of(dataset: Dataset) -> Iterator[bytes]:
    """Yield a dataset's values as bytes that do not depend on how it is stored.

    Hashing a million rows of 250 tokens each takes 2 to 5 s.
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
    """Prepare rows in one process per machine, and memory-map them in all its processes.

    The other processes wait for a lock without a timeout. If the process holding the lock exits,
    the operating system releases the lock and the next process prepares the rows. Propagates errors
    of `prepare` and raises DataError if the disk is full.
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
        if not (rows / "dataset_info.json").exists():  # written last
            try:
                with _writing_to(folder, "TMPDIR"):
                    prepare().save_to_disk(rows)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    mapped = Dataset.load_from_disk(rows)
    dist.barrier()
    # the operating system keeps mapped files until they are closed
    shutil.rmtree(folder, ignore_errors=True)
    return mapped


def map_rows(
    dataset: Dataset,
    columns: list[str],
    function: Callable[[Columns], Columns],
    features: Features,
) -> Dataset:
    """Apply `function` to batches of `columns` and row origins, and return the resulting columns.

    Nothing is cached, because a cached result would be stale after changes to this code. The table
    stays on disk while the process uses it, but its folder is deleted before this function returns.
    `dataset` has the columns that `number_rows` adds. Raises DataError for text that is not UTF-8
    and for a full disk, SystemExit if the process is terminated, and any error of `function`.
    """
    dataset = dataset.select_columns(list(dict.fromkeys([*columns, SOURCE, ROW])))
    workers = 1
    if len(dataset) > MANY_ROWS:
        workers = min(MAX_MAPPING_PROCESSES, usable_cores())
        notice(f"Tokenizing {len(dataset)} rows; processes: {workers}.")
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        with _writing_to(cache, "HF_DATASETS_CACHE"):
            cache.mkdir(parents=True, exist_ok=True)
            # The operating system keeps mapped files until they are closed.
            with tempfile.TemporaryDirectory(prefix="openrlhf-rows-", dir=cache) as folder:
                return dataset.map(
                    function,
                    batched=True,
                    batch_size=500,
                    remove_columns=dataset.column_names,
                    features=features,
                    load_from_cache_file=False,
                    cache_file_name=f"{folder}/rows.arrow",
                    num_proc=workers if workers > 1 else None,
                    desc="Tokenizing",
                )
    except UnicodeDecodeError as error:
        raise DataError(f"{_undecodable(dataset)} has text that is not UTF-8: {error}.") from error
    except Exception:
        if asked():  # on termination, the library raises a worker timeout instead of SystemExit
            raise SystemExit(asked()) from None
        raise


def _undecodable(dataset: Dataset) -> str:
    """Return the origin of the first row with text that is not UTF-8."""
    origins = dataset.select_columns([SOURCE, ROW])
    for place in range(len(dataset)):
        try:
            dataset[place]
        except UnicodeDecodeError:
            return origin_of(origins[place])
    return source_of(dataset)


@contextmanager
def _writing_to(folder: Path, variable: str) -> Iterator[None]:
    """Convert OSErrors to DataErrors, which name the folder's environment `variable`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"Rows cannot be written to {folder}: {error}. Set {variable} to another folder."
        ) from error
