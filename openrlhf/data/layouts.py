"""Column layouts of public datasets, detected from their columns and read with --data.* flags."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import toml_beside
from openrlhf.data.errors import DataError, check_columns, kind, list_columns, row_error, text_of
from openrlhf.data.messages import TOOLS, Message, texts_in
from openrlhf.data.templates import in_common
from openrlhf.data.tokenizer import require_chat_template
from openrlhf.reporting import notice

Row = Mapping[str, Any]
FIRST_ROWS = 8  # number of rows used to detect a dataset's layout and template
DROPPED = "dropped"  # column with the reason for dropping a row
TIE = "that are ties"
MARGIN = "margin"
DATASOURCE = "datasource"
EXTRA = (TOOLS, MARGIN, DATASOURCE)  # optional columns, read if they exist


# ---- layouts that combine several columns


def _read_arena(row: Row) -> Row:
    """Read a Chatbot Arena row: two conversations with the same questions, and the winner."""
    winner = row["winner"]
    a = row["conversation_a"]
    b = row["conversation_b"]
    if winner == "model_a":
        return {**row, "chosen": a, "rejected": b}
    if winner == "model_b":
        return {**row, "chosen": b, "rejected": a}
    if isinstance(winner, str) and winner.startswith("tie"):  # "tie (bothbad)" too
        return {**row, DROPPED: TIE}
    raise row_error(row, "winner", f"is {winner!r}, not model_a, model_b or tie.")


def _read_webgpt(row: Row) -> Row:
    """Read a WebGPT comparison row: a question and two scored answers."""
    question = row["question"]
    if not isinstance(question, dict) or not isinstance(question.get("full_text"), str):
        raise row_error(row, "question", f"is {kind(question)}, not an object with full_text.")
    for column in ("score_0", "score_1"):
        if not isinstance(row[column], int | float):
            raise row_error(row, column, f"is {kind(row[column])}, not a number.")
        if not math.isfinite(row[column]):
            raise row_error(row, column, f"is {row[column]}, so the answers cannot be compared.")
    if row["score_0"] == row["score_1"]:
        return {**row, DROPPED: TIE}
    answers = {"chosen": row["answer_0"], "rejected": row["answer_1"]}
    if row["score_1"] > row["score_0"]:
        answers = {"chosen": row["answer_1"], "rejected": row["answer_0"]}
    return {**row, "prompt": question["full_text"], **answers}


def _system_messages(row: Row) -> list[Message]:
    """Return the system prompt column as a list with one message, or an empty list without one."""
    messages: list[Message] = []
    for name in ("system", "system_prompt"):
        if row.get(name):
            messages.append({"role": "system", "content": text_of(row, name)})
    return messages


def _read_chat(row: Row) -> Row:
    """Prepend the system prompt to the conversation unless it already begins with it."""
    column = "messages" if isinstance(row.get("messages"), list) else "conversations"
    turns = row[column]
    system = _system_messages(row)
    if not isinstance(turns, list) or _opening(turns) == _opening(system):
        return row
    return {**row, column: [*system, *turns]}


def _opening(messages: list[Any]) -> list[str]:
    """Return the first text of the messages, stripped, as a list with at most one item."""
    return [text.strip() for text in texts_in(messages)[:1]]


def _reader_with_context(question: str) -> Callable[[Row], Row]:
    """Return a reader for rows in which the column `input` continues the column `question`.

    The system prompt and a history of [question, answer] pairs come before the question.
    """

    def read(row: Row) -> Row:
        prompt = text_of(row, question)
        if row.get("input"):
            prompt += "\n" + text_of(row, "input")
        messages = _system_messages(row)
        for turn in row.get("history") or ():
            if not isinstance(turn, list) or list(map(kind, turn)) != ["a string", "a string"]:
                raise row_error(row, "history", f"has {turn!r}, not [question, answer].")
            messages.append({"role": "user", "content": turn[0]})
            messages.append({"role": "assistant", "content": turn[1]})
        if not messages:
            return {**row, question: prompt}
        return {**row, question: [*messages, {"role": "user", "content": prompt}]}

    return read


# Readers by --data.layout value. A reader moves a row's texts to the columns that the layout's
# flags name, and raises a DataError that names the row if the row is malformed.
READERS: dict[str, Callable[[Row], Row]] = {
    "alpaca": _reader_with_context("instruction"),
    "arena": _read_arena,
    "chat": _read_chat,
    "orca": _reader_with_context("question"),
    "webgpt": _read_webgpt,
}
JUDGED = ("arena", "webgpt")  # readers that create the pair columns


# ---- recognition


LAYOUTS = toml_beside(__file__)
# A config section without this flag cannot read that kind of rows.
MAIN_FLAGS = {"pairs": "chosen_key", "text": "input_key"}


def _fits(row: Row, columns: Mapping[str, str]) -> bool:
    """Return whether a row has these columns with values of the expected types."""
    for column, expected in columns.items():
        if column not in row or kind(row[column]) not in expected:
            return False
    return True


def _repeats_prompt(row: Row) -> bool:
    """Return whether both answers repeat the prompt's last message.

    Chats repeat it before both answers, plain texts in their common prefix.
    """
    asked = "".join(texts_in(row["prompt"])[-1:]).strip()
    chosen = row["chosen"]
    rejected = row["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        if not asked:
            return True
        return _asks_before_answer(chosen, asked) and _asks_before_answer(rejected, asked)
    shared = in_common(str(chosen), str(rejected))
    return asked in str(chosen)[:shared]


def _asks_before_answer(conversation: list[Any], asked: str) -> bool:
    """Return whether `asked` occurs in a conversation before its last message, the answer."""
    return any(asked in text for text in texts_in(conversation[:-1]))


def recognise(rows: Dataset, config: Any, *kinds: str, answers: str = "output_key") -> Any:
    """Return the `data` section with the flags of the layout that matches the first row.

    Prints a notice about the detected layout. `answers` is the --data.* flag that names the answer
    column. A prompt column is ignored if both answers repeat it in all of the first rows. Column
    flags set by the user are kept, and the notice then names the layout's flags. Raises DataError
    if the rows do not match the layout that --data.layout names.
    """
    data = config.data
    named = data.layout
    first_rows = _first_rows(rows)
    if not first_rows:
        return data
    first = dict(first_rows[0])
    read_here = [name for name in kinds or MAIN_FLAGS if MAIN_FLAGS[name] in vars(data)]
    reads_pairs = "pairs" in read_here and named != "columns"
    if reads_pairs and not data.prompt_key and _all_repeat_prompt(first_rows):
        del first["prompt"]
        notice(
            "The column 'prompt' is not read, because both texts of each of the first rows already "
            "contain the prompt. To prepend it anyway, pass --data.prompt_key prompt."
        )
    found = _layout_of(first, read_here, named)
    if answers not in found and found.get("output_key"):
        found = {**found, answers: found["output_key"]}
    flags = _flags_with_effect(found, config)
    changes = {flag: value for flag, value in flags.items() if value != getattr(data, flag)}
    given = False
    conflict = False
    for flag in flags:
        if flag.endswith("_key") and f"data.{flag}" in config.given:
            given = True
            conflict = conflict or flag in changes
    if named in READERS and (not found or conflict):
        raise DataError(
            f"--data.layout {named} does not match the columns of the dataset, "
            f"{list_columns(list(first))}, or the --data.*_key flags. "
            "Correct them, or pass --data.layout columns."
        )
    if not changes or conflict:
        return data
    typed = " ".join(_typed(flag, value) for flag, value in changes.items() if value)
    if given and named == "auto":
        notice(
            f"Detected dataset layout: {typed}. "
            "It is not applied, because you set --data.*_key flags."
        )
        return data
    notice(
        f"Detected dataset layout: {typed}. "
        "To use the column flags instead, pass --data.layout columns."
    )
    return replace(data, **changes)


def _first_rows(rows: Dataset) -> list[Row]:
    """Return a dataset's first rows, up to a row that is not UTF-8 text."""
    first_rows: list[Row] = []
    with suppress(UnicodeDecodeError):  # `map_rows` reports this row
        for number in range(min(FIRST_ROWS, len(rows))):
            first_rows.append(rows[number])
    return first_rows


def _all_repeat_prompt(rows: Sequence[Row]) -> bool:
    """Return whether all rows' answers repeat the prompt, and at least one prompt is not empty."""
    if not {"prompt", "chosen", "rejected"} <= rows[0].keys():
        return False
    asks = False
    for row in rows:
        if not _repeats_prompt(row):
            return False
        if isinstance(row["chosen"], list) or "".join(texts_in(row["prompt"])):
            asks = True
    return asks


def _layout_of(first: Row, kinds: Sequence[str], named: str) -> dict[str, Any]:
    """Return the flags of the first layout that matches a row, or {} if none does.

    `named` is the value of --data.layout, which restricts the candidates.
    """
    for name in kinds:
        for layout in LAYOUTS[name]:
            flags = layout["flags"]
            if named in ("auto", flags.get("layout")) and _fits(first, layout["columns"]):
                return flags
    return {}


def _flags_with_effect(found: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the layout's flags that this command has and that have an effect.

    An empty value becomes None.
    """
    unused = unused_flags(config)
    flags: dict[str, Any] = {}
    for flag, value in found.items():
        if flag not in vars(config.data):
            continue
        if flag.endswith("_key") and f"data.{flag}" in unused:
            continue
        flags[flag] = value or None
    return flags


def _typed(flag: str, value: Any) -> str:
    """Return a --data.* flag as typed on the command line."""
    if value is True:
        return f"--data.{flag}"
    return f"--data.{flag} {value}"


def columns_read(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any, keys: Sequence[str]
) -> list[str]:
    """Return the columns that these --data.* flags name, and the columns in `EXTRA` that exist.

    A layout with a reader reads all columns. Raises DataError if a column or the chat template is
    missing.
    """
    present = dataset.column_names
    named = {f"--data.{key}": getattr(data, key) for key in keys}
    if data.layout not in JUDGED:
        check_columns(dataset, named)
    if data.apply_chat_template:
        require_chat_template(tokenizer)
    if data.layout in READERS:
        return present
    extra = [column for column in EXTRA if column in present]
    return [*filter(None, named.values()), *extra]
