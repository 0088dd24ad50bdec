"""Column layouts of public datasets, detected from their columns and read with --data.* flags."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.checks import collect, report
from openrlhf.config.effects import unused_flags
from openrlhf.data.errors import DataError, check_columns, kind, list_columns, row_error, text_of
from openrlhf.data.messages import TOOLS, Message, texts_in
from openrlhf.data.templates import in_common
from openrlhf.data.tokenizer import require_chat_template
from openrlhf.reporting import notice

Row = Mapping[str, Any]
FIRST_ROWS = 8  # number of rows used to detect a dataset's layout and template
DROPPED = "__dropped__"  # column with the reason for dropping a row
TIE = "that are ties"
MARGIN = "margin"
DATASOURCE = "datasource"
EXTRA = (TOOLS, MARGIN, DATASOURCE)  # optional columns, read if they exist


# ---- layouts that combine several columns


def _read_arena(row: Row) -> Row:
    """Read a Chatbot Arena row: two conversations with the same questions, and the winner."""
    winner = row["winner"]
    if winner == "model_a":
        return {**row, "chosen": row["conversation_a"], "rejected": row["conversation_b"]}
    if winner == "model_b":
        return {**row, "chosen": row["conversation_b"], "rejected": row["conversation_a"]}
    if str(winner).startswith("tie"):  # also matches "tie (bothbad)"
        return {**row, DROPPED: TIE}
    raise row_error(row, "winner", f"is {winner!r}, not model_a, model_b or tie.")


def _read_webgpt(row: Row) -> Row:
    """Read a WebGPT comparison row: a question and two scored answers."""
    question = row["question"]
    if not isinstance(question, dict) or not isinstance(question.get("full_text"), str):
        raise row_error(row, "question", f"is {kind(question)}, not an object with full_text.")
    for column in ("score_0", "score_1"):
        score = row[column]
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise row_error(row, column, f"is {score!r}, not a finite number.")
    if row["score_0"] == row["score_1"]:
        return {**row, DROPPED: TIE}
    best = int(row["score_1"] > row["score_0"])
    answers = {"chosen": row[f"answer_{best}"], "rejected": row[f"answer_{1 - best}"]}
    return {**row, "prompt": question["full_text"], **answers}


def _system_messages(row: Row) -> list[Message]:
    """Return the row's system prompt as a list with one message, or [] if the row has none."""
    messages: list[Message] = []
    for name in ("system", "system_prompt"):
        if row.get(name):
            messages.append({"role": "system", "content": text_of(row, name)})
    return messages


def _read_chat(row: Row) -> Row:
    """Prepend the system prompt to the conversation, unless the conversation begins with it."""
    column = "messages" if isinstance(row.get("messages"), list) else "conversations"
    turns = row[column]
    system = _system_messages(row)
    opening = "".join(texts_in(turns)[:1])
    if not isinstance(turns, list) or opening.strip() == "".join(texts_in(system)).strip():
        return row
    return {**row, column: [*system, *turns]}


def _read_with_context(question: str, row: Row) -> Row:
    """Read a row in which the column `input` continues the column `question`.

    The system prompt and a history of [question, answer] pairs come before the question.
    """
    prompt = text_of(row, question)
    if row.get("input"):
        prompt += "\n" + text_of(row, "input")
    messages = _system_messages(row)
    for turn in row.get("history") or ():
        if not isinstance(turn, list) or list(map(kind, turn)) != ["a string", "a string"]:
            raise row_error(row, "history", f"has {turn!r}, not [question, answer].")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": text})
    if not messages:
        return {**row, question: prompt}
    return {**row, question: [*messages, {"role": "user", "content": prompt}]}


# Readers by --data.layout value.
# A reader moves a row's texts to the columns that the layout's flags name.
# If the row is malformed, the reader raises a DataError that names the row.
READERS: dict[str, Callable[[Row], Row]] = {
    "alpaca": partial(_read_with_context, "instruction"),
    "arena": _read_arena,
    "chat": _read_chat,
    "orca": partial(_read_with_context, "question"),
    "webgpt": _read_webgpt,
}
JUDGED = ("arena", "webgpt")  # readers that create the pair columns


# ---- recognition


# Flags that name a layout's columns, in order.
# A config section without the first flag cannot read rows of that kind.
KEYS = {
    "pairs": ("prompt_key", "chosen_key", "rejected_key"),
    "text": ("input_key", "output_key", "label_key"),
}


class ColumnLayout(NamedTuple):
    """The columns of a public dataset with the types of their values.

    `reader` is the value of --data.layout for a layout that combines columns. The `KEYS` flags name
    the columns in order, or `keys` ("" for no column).
    """

    columns: Mapping[str, str]
    reader: str = ""
    keys: Sequence[str] = ()


# Known layouts by kind. The first match is used.
LAYOUTS = {
    "pairs": [
        # Chatbot Arena
        ColumnLayout(
            {"winner": "string", "conversation_a": "list", "conversation_b": "list"},
            "arena",
            keys=("", "chosen", "rejected"),
        ),
        # WebGPT comparisons
        ColumnLayout(
            {
                "question": "object",
                "answer_0": "string",
                "answer_1": "string",
                "score_0": "number",
                "score_1": "number",
            },
            "webgpt",
            keys=("prompt", "chosen", "rejected"),
        ),
        # Alpaca
        ColumnLayout({"instruction": "string", "chosen": "string", "rejected": "string"}, "alpaca"),
        # Orca
        ColumnLayout({"question": "string", "chosen": "string", "rejected": "string"}, "orca"),
        # ShareGPT, system column
        ColumnLayout(
            {
                "conversations": "list",
                "chosen": "object",
                "rejected": "object",
                "system": "string or null",
            },
            "chat",
        ),
        # ShareGPT
        ColumnLayout({"conversations": "list", "chosen": "object", "rejected": "object"}),
        # chats
        ColumnLayout({"prompt": "list or string", "chosen": "list", "rejected": "list"}),
        # whole conversations
        ColumnLayout({"chosen": "list", "rejected": "list"}, keys=("", "chosen", "rejected")),
        # plain text
        ColumnLayout({"prompt": "string or number", "chosen": "string", "rejected": "string"}),
    ],
    "text": [
        # Alpaca
        ColumnLayout({"instruction": "string", "output": "string"}, "alpaca"),
        # score of 0 or 1
        ColumnLayout(
            {"instruction": "string", "response": "string", "score": "number or string"}, "alpaca"
        ),
        ColumnLayout({"instruction": "string", "response": "string"}, "alpaca"),
        # OpenOrca
        ColumnLayout({"question": "string", "response": "string"}, "orca"),
        # chats, system column
        ColumnLayout(
            {"messages": "list", "system": "string or null"}, "chat", keys=("messages", "")
        ),
        ColumnLayout({"messages": "list"}, keys=("messages", "")),
        # ShareGPT, system column
        ColumnLayout(
            {"conversations": "list", "system": "string or null"},
            "chat",
            keys=("conversations", ""),
        ),
        # ShareGPT
        ColumnLayout({"conversations": "list"}, keys=("conversations", "")),
        ColumnLayout({"prompt": "list", "completion": "list"}),
        ColumnLayout({"prompt": "string", "completion": "string"}),
        ColumnLayout({"prompt": "string", "response": "string"}),
        # GSM8K
        ColumnLayout({"question": "string", "answer": "string"}),
        ColumnLayout({"input": "string", "output": "string"}),
        # RL prompts
        ColumnLayout({"prompt": "list"}, keys=("prompt", "")),
        ColumnLayout({"prompt": "string"}, keys=("prompt", "")),
    ],
}


def flags_of(kind: str, layout: ColumnLayout) -> dict[str, Any]:
    """Return the --data.* flags that read a layout.

    Layouts with a list of messages need the chat template.
    """
    flags: dict[str, Any] = {}
    if layout.reader:
        flags["layout"] = layout.reader
    if "list" in layout.columns.values():
        flags["apply_chat_template"] = True
    return flags | dict(zip(KEYS[kind], layout.keys or layout.columns, strict=False))


def _fits(row: Row, columns: Mapping[str, str]) -> bool:
    """Return whether a row has these columns with values of the expected types."""
    for column, expected in columns.items():
        if column not in row or kind(row[column]).split()[-1] not in expected:
            return False
    return True


def _repeats_prompt(row: Row) -> bool:
    """Return whether both answers repeat the prompt's last message before they differ."""
    asked = "".join(texts_in(row["prompt"])[-1:]).strip()
    before: list[str] = []
    for answer in (row["chosen"], row["rejected"]):
        if isinstance(answer, list):
            answer = "".join(texts_in(answer[:-1]))  # the last message is the answer itself
        before.append(str(answer))
    return asked in before[0][: in_common(*before)]


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
    read_here = [name for name in kinds or KEYS if KEYS[name][0] in vars(data)]
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
    given = [flag for flag in flags if flag.endswith("_key") and f"data.{flag}" in config.given]
    conflict = not changes.keys().isdisjoint(given)
    if named in READERS and (not found or conflict):
        raise DataError(
            f"--data.layout {named} does not match the columns of the dataset, "
            f"{list_columns(list(first))}, or the --data.*_key flags. "
            "Correct them, or pass --data.layout columns."
        )
    if not changes or conflict:
        return data
    typed = ""
    for flag, value in changes.items():
        if value:
            typed += f" --data.{flag}" if value is True else f" --data.{flag} {value}"
    seen = f"Detected dataset layout:{typed}."
    if given and named == "auto":
        notice(f"{seen} The layout is not applied, because you set --data.*_key flags.")
        return data
    notice(f"{seen} To use the column flags instead, pass --data.layout columns.")
    return replace(data, **changes)


def _first_rows(rows: Dataset) -> list[Row]:
    """Return a dataset's first rows, or no rows if they are not UTF-8 text."""
    try:
        first_rows: Any = list(rows.select(range(min(FIRST_ROWS, len(rows)))))
    except UnicodeDecodeError:  # `map_rows` reports it
        return []
    return first_rows


def _all_repeat_prompt(rows: Sequence[Row]) -> bool:
    """Return whether all rows' answers repeat the prompt. Empty prompts count only in chats."""
    if not {"prompt", "chosen", "rejected"} <= rows[0].keys():
        return False
    if not all(map(_repeats_prompt, rows)):
        return False
    is_chat = isinstance(rows[0]["chosen"], list)
    return is_chat or any("".join(texts_in(row["prompt"])) for row in rows)


def _layout_of(first: Row, kinds: Sequence[str], named: str) -> dict[str, Any]:
    """Return the flags of the first layout that matches a row, or {} if none does.

    `named` is the value of --data.layout, which restricts the candidates.
    """
    for name in kinds:
        for layout in LAYOUTS[name]:
            if named in ("auto", layout.reader) and _fits(first, layout.columns):
                return flags_of(name, layout)
    return {}


def _flags_with_effect(found: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the layout's flags that exist in this command and have an effect.

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


def columns_read(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any, keys: Sequence[str]
) -> list[str]:
    """Return the columns that these --data.* flags name, and the columns in `EXTRA` that exist.

    A layout with a reader reads all columns. Raises DataError if a column or the chat template is
    missing.
    """
    present = dataset.column_names
    named = {f"--data.{key}": getattr(data, key) for key in keys}
    checks: list[Callable[[], None]] = []
    if data.layout not in JUDGED:
        checks.append(partial(check_columns, dataset, named))
    if data.apply_chat_template:
        checks.append(partial(require_chat_template, tokenizer))
    report(*collect(*checks))
    if data.layout in READERS:
        return present
    extra = [column for column in EXTRA if column in present]
    return [*filter(None, named.values()), *extra]
