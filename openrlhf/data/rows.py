"""Rows of a dataset: their origin, and how they become rows of tokens."""

import fcntl
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import datasets.config
import torch.distributed as dist
import torch.utils.data
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import notice
from openrlhf.config.machine import usable_cores, world_size
from openrlhf.data.control_tokens import ControlTokens, check_control_tokens
from openrlhf.data.errors import MALFORMED, ROW, SOURCE, DataError
from openrlhf.data.findings import report
from openrlhf.data.layouts import READERS, columns_read
from openrlhf.data.lost_tools import ONLY_CALLS, check_tools
from openrlhf.data.templates import Encoded, Passage, encode
from openrlhf.data.text_files import without_added_nulls
from openrlhf.termination import asked

MANY_ROWS = 20_000  # more are mapped by several processes, and their results kept on disk

Columns = dict[str, list[Any]]
Row = TypeVar("Row")  # a data class


def number_rows(dataset: Dataset, source: str = "the dataset") -> Dataset:
    """The dataset with the columns that give the origin of a row, unless they are there already."""
    if SOURCE in dataset.column_names:
        return dataset
    rows = len(dataset)
    # The library types the fingerprint, which it computes itself, as required.
    dataset = dataset.add_column(SOURCE, [source] * rows)  # pyright: ignore[reportCallIssue]
    return dataset.add_column(ROW, list(range(1, rows + 1)))  # pyright: ignore[reportCallIssue]


Result = dict[str, Any] | str  # the columns of a row, or the reason why the row is dropped
MOST_NAMED = 5  # malformed rows
STORED = {bool: Value("bool"), int: Value("int32"), float: Value("float64"), str: Value("string")}
STORED |= {list[kind]: List(value) for kind, value in STORED.items()}
# Columns besides the fields of a row.
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


class TokenizedRows(torch.utils.data.Dataset[Row], ABC):
    """The rows of a dataset as tokens, made when the object is created. `summary` counts dropped
    rows by reason.

    The processes of a launcher must all create the object: one process of each machine makes the
    tokens. `data` is the section of the flags with the columns, the layout and `max_len`.
    """

    row: ClassVar[Any]  # the data class of a row; its fields of the types in `STORED` are kept
    keys: tuple[str, ...]  # flags of --data.* that name columns
    what: ClassVar[str] = "row"  # the word for a row in messages

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any) -> None:
        """Raises DataError for a missing column, for malformed rows (the first are named), and if
        no row is left.
        """
        self.tokenizer, self.data, what = tokenizer, data, self.what
        used = columns_read(dataset, tokenizer, data, self.keys)
        own = {field.name: STORED[field.type] for field in fields(self.row) if field.type in STORED}
        self.features = Features({**own, **NOTES})
        dataset = number_rows(dataset)
        self._types = dataset.features
        self.control = ControlTokens.of(tokenizer, in_chats=data.apply_chat_template)
        mapped = once_per_machine(
            lambda: map_rows(dataset, used, self._encoded, self.features, "Tokenizing")
        )
        if malformed := [problem for problem in mapped[MALFORMED][:] if problem]:
            count = f"\n{len(malformed)} of {len(mapped)} rows are malformed." * (
                len(malformed) > 1
            )
            raise DataError("\n".join(malformed[:MOST_NAMED]) + count)
        self._look_for_control_tokens(mapped, dataset)
        self._look_for_lost_tools(mapped, dataset)
        reasons = mapped["dropped"][:]
        counts = Counter(reasons)
        dropped = ", ".join(
            f"{count} {reason}" for reason, count in sorted(counts.items()) if reason
        )
        self.summary: str = (
            f"{counts['']} of {len(reasons)} {what}s kept{', dropped ' * bool(dropped)}{dropped}."
        )
        if not counts[""]:
            flags = ", ".join(f"--data.{key}" for key in self.keys)
            raise DataError(
                f"No {what} is left: {self.summary} Look at {flags} and --data.max_len."
            )
        self.rows = mapped.select([number for number, reason in enumerate(reasons) if not reason])
        if cut := sum(self.rows["cut"]):
            self.summary += (
                f" {cut} of the kept {what}s were cut to {data.max_len} tokens (--data.max_len)."
            )
        self._fields = self.rows.select_columns(list(own))

    def _look_for_control_tokens(self, mapped: Dataset, dataset: Dataset) -> None:
        found = [token or "" for token in mapped["control"][:]]
        if not any(found):
            return
        report(
            check_control_tokens(
                found,
                what=self.what,
                first=_first_origin(found, dataset),
                rendered=not self.data.apply_chat_template
                and self.data.input_template in (None, "{}"),
            )
        )

    def _look_for_lost_tools(self, mapped: Dataset, dataset: Dataset) -> None:
        lost = [tool or "" for tool in mapped["lost"][:]]
        if not any(lost):
            return
        report(
            check_tools(
                lost,
                empty=sum(mapped["empty"][:]),
                what=self.what,
                first=_first_origin(lost, dataset),
                model=repr(self.tokenizer.name_or_path),
            )
        )

    @abstractmethod
    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """The texts of a row, or the reason why the row is dropped."""

    @abstractmethod
    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """The columns of a row whose texts are tokens now, or the reason why the row is dropped."""

    def _encoded(self, columns: Columns) -> Columns:
        """Batches of columns as the columns of `features`. `dropped` and `MALFORMED` have the
        reason and the mistake, if any.
        """
        read = READERS.get(self.data.layout, dict)
        kept = {}
        for name, values in columns.items():
            kept[name] = [without_added_nulls(value, self._types[name]) for value in values]
        rows = [
            attempt(read, dict(zip(columns, row, strict=True)))
            for row in zip(*kept.values(), strict=True)
        ]
        texts = [attempt(self.passages, row) for row in rows]
        to_encode = [passage.text for text in texts if isinstance(text, list) for passage in text]
        encoded = iter(encode(self.tokenizer, to_encode))
        results = [
            attempt(self.columns, row, text, [next(encoded) for _ in text])
            if isinstance(text, list)
            else text
            for row, text in zip(rows, texts, strict=True)
        ]
        blank = {"dropped": "", "cut": False, "rewritten": 0, "unended": 0, "control": ""}
        made = [
            {"dropped": result} if isinstance(result, str) else blank | result for result in results
        ]
        written = [getattr(self.data, key) for key in self.keys if key != "label_key"]
        for result, row, text in zip(made, rows, texts, strict=True):
            result |= _lost_in(text)
            result["control"] = self.control.first_in(
                [row.get(column) for column in written if column]
            )
        return {name: [row.get(name) for row in made] for name in self.features}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.row(**self._fields[index])

    def contents(self) -> Iterator[bytes]:
        """All rows as bytes, to be hashed."""
        return contents_of(self._fields)


def _first_origin(found: list[str], dataset: Dataset) -> str:
    """Return the dataset and the number of the first row in which something was found."""
    place = next(place for place, each in enumerate(found) if each)
    origin = dataset.select_columns([SOURCE, ROW])[place]
    return f"{origin[SOURCE]}, row {origin[ROW]},"


def _lost_in(text: Any) -> dict[str, Any]:
    """Return what the template left out of a row's tools. `text`: its passages, or why it is
    dropped.
    """
    if text == ONLY_CALLS:
        return {"lost": "the calls of its answer", "empty": 0}
    passages: list[Passage] = text if isinstance(text, list) else []
    lost = next((passage.lost for passage in passages if passage.lost), "")
    return {"lost": lost, "empty": sum(passage.empty for passage in passages)}


def attempt(step: Callable[..., Any], row: dict[str, Any], *arguments: Any) -> Any:
    """What a step makes of a row, or a column with the mistake that this step or an earlier one
    found in the row.
    """
    try:
        return row if MALFORMED in row else step(row, *arguments)
    except DataError as error:
        return {MALFORMED: str(error)}


def without_origin(dataset: Dataset) -> Dataset:
    """Return a dataset without the columns that say where its rows came from."""
    return dataset.select_columns(
        [name for name in dataset.column_names if name not in (SOURCE, ROW)]
    )


def contents_of(dataset: Dataset) -> Iterator[bytes]:
    """All values of a dataset as bytes, however the dataset is stored; a million rows of 250 tokens
    take 2 to 5 s to hash.
    """
    batches: Any = dataset.with_format("arrow").iter(1000)
    for column in (column for batch in batches for column in batch.columns):
        values = column.combine_chunks()
        while hasattr(values, "value_lengths"):  # a list
            yield values.value_lengths().to_numpy(zero_copy_only=False).tobytes()
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        yield (
            repr(values.to_pylist()).encode(errors="surrogatepass")
            if array.dtype == object
            else array.tobytes()
        )


def once_per_machine(prepare: Callable[[], Dataset]) -> Dataset:
    """One process of this machine prepares the rows and saves them; all processes of the machine
    map the files.

    The others wait for a lock. The system takes the lock from a process that ends, and the next
    process prepares: there is no deadline. Raises DataError as `prepare` does, and if the disk is
    full.
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
        if not (rows / "dataset_info.json").exists():  # the file that is written last
            try:
                prepare().save_to_disk(rows)
            except BaseException as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                raise DataError(
                    f"Rows cannot be written to {folder}: {error}. TMPDIR names another folder."
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
    """The columns that `function` makes of batches of these columns and of the rows' origins.

    Nothing is cached, because a cached result would outlive a change of this code. The tables of
    many rows are on disk while the process uses them, but their folder is deleted before this
    function returns. `dataset` is a result of `number_rows`. Raises DataError for text that is not
    UTF-8 and for a full disk, SystemExit if the process is asked to end, and every error of
    `function`.
    """
    dataset = dataset.select_columns(list(dict.fromkeys([*columns, SOURCE, ROW])))
    options: dict[str, Any] = {"keep_in_memory": True}
    folder = None
    if len(dataset) > MANY_ROWS:
        workers = min(8, usable_cores())
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="openrlhf-rows-", dir=cache))
        options = {
            "cache_file_name": str(folder / "rows.arrow"),
            "num_proc": workers if workers > 1 else None,
        }
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
        if asked():  # the library raises a worker's time-out in place of SystemExit
            raise SystemExit(asked()) from None
        if folder and isinstance(error, OSError):
            problem = f"Rows cannot be written to {folder}: {error}. Set HF_DATASETS_CACHE to another folder."
            raise DataError(problem) from error
        raise
    finally:
        if folder:
            shutil.rmtree(
                folder, ignore_errors=True
            )  # the system keeps mapped files while they are in use


def _first_unreadable(dataset: Dataset) -> str:
    for number in range(len(dataset)):
        try:
            dataset[number]
        except UnicodeDecodeError:
            origin = dataset.select_columns([SOURCE, ROW])[number]
            return f"{origin[SOURCE]}, row {origin[ROW]}:"
    raise AssertionError("every row could be read")
