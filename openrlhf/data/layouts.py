"""Layouts of public datasets: recognised by their columns, as the flags of --data.* that read them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.effects import unmet
from openrlhf.config.flags import flags_of, notice, toml_beside
from openrlhf.data.errors import DataError, check_columns, kind, list_columns, row_error, text_of
from openrlhf.data.templates import TOOLS, Message, in_common, texts_in
from openrlhf.data.tokenizer import require_chat_template

Row = Mapping[str, Any]
LOOKED_AT = 8  # rows, the first ones
DROPPED, TIE = "dropped", "that are ties"
MARGIN, DATASOURCE = "margin", "datasource"
EXTRA = (TOOLS, MARGIN, DATASOURCE)  # columns that are read if a dataset has them


# ---- layouts whose texts are in several columns


def _arena(row: Row) -> Row:
    """Chatbot Arena: two conversations with the same questions, and the winner."""
    winner = row["winner"]
    if not isinstance(winner, str) or not winner.startswith(("model_a", "model_b", "tie")):
        raise row_error(row, "winner", f"is {winner!r}, not model_a, model_b or tie.")
    if winner.startswith("tie"):
        return {**row, DROPPED: TIE}
    a, b = row["conversation_a"], row["conversation_b"]
    return (
        {**row, "chosen": a, "rejected": b}
        if winner == "model_a"
        else {**row, "chosen": b, "rejected": a}
    )


def _webgpt(row: Row) -> Row:
    """WebGPT comparisons: a question, and two answers with scores."""
    question = row["question"]
    if not isinstance(question, dict) or not isinstance(question.get("full_text"), str):
        raise row_error(row, "question", f"is {kind(question)}, not an object with full_text.")
    for column in ("score_0", "score_1"):
        if not isinstance(row[column], int | float):
            raise row_error(row, column, f"is {kind(row[column])}, not a number.")
    if row["score_0"] == row["score_1"]:
        return {**row, DROPPED: TIE}
    best = int(row["score_1"] > row["score_0"])
    asked, chosen, rejected = (
        question["full_text"],
        row[f"answer_{best}"],
        row[f"answer_{1 - best}"],
    )
    return {**row, "prompt": asked, "chosen": chosen, "rejected": rejected}


def _system(row: Row) -> list[Message]:
    """The system text in a column of its own, as a message; none if the row has none."""
    return [
        {"role": "system", "content": text_of(row, name)}
        for name in ("system", "system_prompt")
        if row.get(name)
    ]


def _chat(row: Row) -> Row:
    """A conversation that goes on after a system text, unless the conversation begins with that
    text itself.
    """
    column = "messages" if isinstance(row.get("messages"), list) else "conversations"
    turns, opening = row[column], _system(row)
    begins, system = ([text.strip() for text in texts_in(said)[:1]] for said in (turns, opening))
    return (
        row
        if begins == system or not isinstance(turns, list)
        else {**row, column: [*opening, *turns]}
    )


def _with_context(question: str) -> Callable[[Row], Row]:
    """A question that `input` goes on with, after a system text and a history of [question,
    answer].
    """

    def read(row: Row) -> Row:
        prompt = "\n".join(
            text_of(row, column)
            for column in (question, "input")
            if column == question or row.get(column)
        )
        messages = _system(row)
        for turn in row.get("history") or ():
            if not (isinstance(turn, list) and [kind(text) for text in turn] == ["a string"] * 2):
                raise row_error(row, "history", f"has {turn!r}, which is no [question, answer].")
            messages += [
                {"role": "user", "content": turn[0]},
                {"role": "assistant", "content": turn[1]},
            ]
        return {
            **row,
            question: [*messages, {"role": "user", "content": prompt}] if messages else prompt,
        }

    return read


# By the value of --data.layout: a row in, the row with the texts in the columns that the layout's
# flags name out. Raise DataError, naming the row.
READERS: dict[str, Callable[[Row], Row]] = {
    "alpaca": _with_context("instruction"),
    "arena": _arena,
    "chat": _chat,
    "orca": _with_context("question"),
    "webgpt": _webgpt,
}
JUDGED = ("arena", "webgpt")  # readers that make the columns of pairs


# ---- recognising


LAYOUTS = toml_beside(__file__)
CHIEF = {
    "pairs": "chosen_key",
    "text": "input_key",
}  # a section of flags without it reads no rows of the kind


def _fits(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether a row has these columns, with values of these kinds."""
    return all(
        column in row and kind(row[column]) in expected for column, expected in columns.items()
    )


def _repeats_prompt(row: Row) -> bool:
    """Whether the last message of the prompt is in the beginning that both texts share, or before
    both answers of chats.
    """
    asked, sides = "".join(texts_in(row["prompt"])[-1:]).strip(), [row["chosen"], row["rejected"]]
    if all(isinstance(side, list) for side in sides):
        return all(
            not asked or any(asked in text for text in texts_in(side[:-1])) for side in sides
        )
    chosen, rejected = map(str, sides)
    return asked in chosen[: in_common(chosen, rejected)]


def recognise(rows: Dataset, config: Any, *kinds: str, answers: str = "output_key") -> Any:
    """The section `data` of the configuration, with the flags of the layout that fits the first
    row, and a notice.

    `answers`: the flag of --data.* that reads the answers to the prompts. A prompt column is not
    used if both answers repeat it in all of the first rows. Columns that the user names with flags
    are kept, and the notice says what is missing. Raises DataError if the rows do not have the
    layout that --data.layout names.
    """
    data, named = config.data, config.data.layout
    first_rows: list[Row] = []
    with suppress(UnicodeDecodeError):  # `map_rows` names the row; those before it are kept
        for number in range(min(LOOKED_AT, len(rows))):
            first_rows.append(rows[number])
    if not first_rows:
        return data
    first = dict(first_rows[0])
    read_here = [name for name in kinds or CHIEF if CHIEF[name] in vars(data)]
    if (
        "pairs" in read_here
        and named != "columns"
        and not data.prompt_key
        and _all_repeat_prompt(first_rows)
    ):
        del first["prompt"]
        notice(
            "The column 'prompt' is not read, because both texts of each of the first rows have the prompt already. "
            "--data.prompt_key prompt puts it in front once more."
        )
    found = _layout_of(first, read_here, named)
    if answers not in found and found.get("output_key"):
        found = {**found, answers: found["output_key"]}
    flags = _flags_with_effect(found, config)
    given = {flag for flag in flags if flag.endswith("_key") and f"data.{flag}" in config.given}
    changes = {flag: value for flag, value in flags.items() if value != getattr(data, flag)}
    if named in READERS and (not found or given & changes.keys()):
        there = list_columns(list(first))
        raise DataError(
            f"--data.layout {named} has other columns than the dataset, {there}, or than the --data.*_key flags."
        )
    if not changes or given & changes.keys():
        return data
    typed = " ".join(_typed(flag, value) for flag, value in changes.items() if value)
    if given and named == "auto":
        notice(
            f"The rows have the layout of {typed}, which is not added, because flags name some columns."
        )
        return data
    notice(
        f"The rows have the layout of {typed}, and are read so. --data.layout columns: as the flags say."
    )
    return replace(data, **changes)


def _all_repeat_prompt(rows: Sequence[Row]) -> bool:
    """Return whether both answers of all rows repeat the prompt, and at least one prompt says
    something.
    """
    if not {"prompt", "chosen", "rejected"} <= rows[0].keys():
        return False
    asks = any(isinstance(row["chosen"], list) or "".join(texts_in(row["prompt"])) for row in rows)
    return asks and all(map(_repeats_prompt, rows))


def _layout_of(first: Row, kinds: Sequence[str], named: str) -> dict[str, Any]:
    """Return the flags of the first layout that fits a row, and that `named`, a value of
    --data.layout, allows; else {}.
    """
    for name in kinds:
        for layout in LAYOUTS[name]:
            flags = layout["flags"]
            if named in ("auto", flags.get("layout")) and _fits(first, layout["columns"]):
                return flags
    return {}


def _flags_with_effect(found: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the flags of a layout that the command has, and that have an effect; "" becomes None."""
    declared = flags_of(config.__class__)
    flags: dict[str, Any] = {}
    for flag, value in found.items():
        if flag not in vars(config.data):
            continue
        if flag.endswith("_key") and unmet(config, declared[f"data.{flag}"]):
            continue
        flags[flag] = value or None
    return flags


def _typed(flag: str, value: Any) -> str:
    """Return a flag of --data.* as a user types it."""
    return f"--data.{flag}" if value is True else f"--data.{flag} {value}"


def columns_read(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any, keys: Sequence[str]
) -> list[str]:
    """The columns that these flags of --data.* name, and those of `EXTRA`; all columns if the
    layout has a reader.

    Raises DataError for a missing column or chat template.
    """
    there, named = dataset.column_names, {f"--data.{key}": getattr(data, key) for key in keys}
    if data.layout not in JUDGED:
        check_columns(dataset, named)
    if data.apply_chat_template:
        require_chat_template(tokenizer)
    if data.layout in READERS:
        return there
    return [column for column in (*named.values(), *({*EXTRA} & {*there})) if column]
