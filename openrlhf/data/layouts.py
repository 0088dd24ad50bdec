"""Layouts of public datasets: recognised by their columns, as the flags of --data.* that read them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.effects import unmet
from openrlhf.config.flags import flags_of, toml_beside
from openrlhf.data.errors import ROW, SOURCE, DataError, check_columns, kind, notice, row_error, text_of
from openrlhf.data.templates import TOOLS, texts_in
from openrlhf.data.tokenizer import require_chat_template

Row = Mapping[str, Any]
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
    return {**row, "chosen": a, "rejected": b} if winner == "model_a" else {**row, "chosen": b, "rejected": a}


def _webgpt(row: Row) -> Row:
    """WebGPT comparisons: a question, and two answers with scores."""
    question = row["question"]
    if not isinstance(question, dict) or not isinstance(question.get("full_text"), str):
        raise row_error(row, "question", f"is {kind(question)}, not an object with full_text.")
    scores = row["score_0"], row["score_1"]
    for column, score in zip(("score_0", "score_1"), scores, strict=True):
        if not isinstance(score, int | float):
            raise row_error(row, column, f"is {kind(score)}, not a number.")
    if scores[0] == scores[1]:
        return {**row, DROPPED: TIE}
    answers = [row["answer_0"], row["answer_1"]]
    best = int(scores[1] > scores[0])
    found = {"chosen": answers[best], "rejected": answers[1 - best]}
    return {**row, "prompt": question["full_text"], **found}


def _with_context(question: str) -> Callable[[Row], Row]:
    """A question that `input` goes on with, after a system text and a history of [question, answer]."""

    def read(row: Row) -> Row:
        prompt = "\n".join(
            text_of(row, column) for column in (question, "input") if column == question or row.get(column)
        )
        systems = [text_of(row, column) for column in ("system", "system_prompt") if row.get(column)]
        messages = [{"role": "system", "content": text} for text in systems]
        for turn in row.get("history") or ():
            if not (isinstance(turn, list) and [kind(text) for text in turn] == ["a string"] * 2):
                raise row_error(row, "history", f"has {turn!r}, which is no [question, answer].")
            messages += [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
        return {**row, question: [*messages, {"role": "user", "content": prompt}] if messages else prompt}

    return read


# By the value of --data.layout: a row in, the row with the texts in the columns that the layout's flags name out.
READERS: dict[str, Callable[[Row], Row]] = {
    "alpaca": _with_context("instruction"),
    "arena": _arena,
    "orca": _with_context("question"),
    "webgpt": _webgpt,
}
JUDGED = ("arena", "webgpt")  # readers that make the columns of pairs


# ---- recognising


LAYOUTS = toml_beside(__file__)
CHIEF = {"pairs": "chosen_key", "text": "input_key"}  # a section of flags without it reads no rows of the kind


def _fits(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether a row has these columns; a prompt that the chosen text repeats is none."""
    fits = all(kind(row.get(column)) == expected for column, expected in columns.items())
    if not fits or not {"prompt", "chosen"} <= columns.keys():
        return fits
    return "".join(texts_in(row["prompt"])[-1:]).strip() not in "\n".join(texts_in(row["chosen"]))


def recognise(rows: Dataset, config: Any, *kinds: str) -> Any:
    """The section `data` of the configuration, with the flags of the layout that fits the first row, and a notice.

    If the user names columns with flags, they stay, and the notice says what is missing. Raises DataError if the rows
    do not have the layout that --data.layout names.
    """
    data, named = config.data, config.data.layout
    try:
        first: Row = rows[0]
    except UnicodeDecodeError:  # `map_rows` names the row
        return data
    read_here = [each for name in kinds or CHIEF if CHIEF[name] in vars(data) for each in LAYOUTS[name]]
    fitting = (each["flags"] for each in read_here if _fits(first, each["columns"]))
    found = next((flags for flags in fitting if named in ("auto", flags.get("layout"))), {})
    declared, own = flags_of(config.__class__), [flag for flag in found if flag in vars(data)]
    used = {flag for flag in own if not (flag.endswith("_key") and unmet(config, declared[f"data.{flag}"]))}
    flags = {flag: value or None for flag, value in found.items() if flag in used}
    given = {flag for flag in flags if flag.endswith("_key") and f"data.{flag}" in config.given}
    changes = {flag: value for flag, value in flags.items() if value != getattr(data, flag)}
    if named in READERS and (not found or given & changes.keys()):
        there = ", ".join(repr(column) for column in first if column not in (SOURCE, ROW))
        raise DataError(
            f"--data.layout {named} has other columns than the dataset, {there}, or than the --data.*_key flags."
        )
    if not changes or given & changes.keys():
        return data
    typed = " ".join(f"--data.{flag}" + f" {value}" * (value is not True) for flag, value in changes.items() if value)
    if given and named == "auto":
        notice(f"The rows have the layout of {typed}, which is not added, because flags name some columns.")
        return data
    notice(f"The rows have the layout of {typed}, and are read so. --data.layout columns: as the flags say.")
    return replace(data, **changes)


def columns_read(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: Any, keys: Sequence[str]) -> list[str]:
    """The columns that these flags of --data.* name, and those of `EXTRA`; all columns if the layout has a reader.

    Raises DataError for a missing column or chat template.
    """
    there, named = dataset.column_names, {f"--data.{key}": getattr(data, key) for key in keys}
    if data.layout not in JUDGED:
        check_columns(there, named)
    if data.apply_chat_template:
        require_chat_template(tokenizer)
    if data.layout in READERS:
        return there
    return [column for column in (*named.values(), *({*EXTRA} & {*there})) if column]


def read(row: Row, layout: str) -> Row:
    """The row with its texts where the flags of the layout expect them. Raises DataError, naming the row."""
    return READERS[layout](row) if layout in READERS else row
