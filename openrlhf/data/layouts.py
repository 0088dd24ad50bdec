"""Public preference datasets, recognised by their columns and read as pairs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.data.errors import kind, row_error

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PairLayout:
    """The columns of a public dataset. `pair` gives a row with "chosen" and "rejected", or None for a tie."""

    columns: tuple[str, ...]
    pair: Callable[[Row], Row | None]
    has_prompt: bool  # whether `pair` adds "prompt" too


def _arena(row: Row) -> Row | None:
    """Chatbot Arena: two conversations with the same questions, and the winner."""
    winner = row["winner"]
    if not isinstance(winner, str) or not winner.startswith(("model_a", "model_b", "tie")):
        raise row_error(row, "winner", f"is {winner!r}, not model_a, model_b or tie.")
    if winner.startswith("tie"):
        return None
    a, b = row["conversation_a"], row["conversation_b"]
    return {**row, "chosen": a, "rejected": b} if winner == "model_a" else {**row, "chosen": b, "rejected": a}


def _webgpt(row: Row) -> Row | None:
    """WebGPT comparisons: a question, and two answers with scores."""
    question = row["question"]
    if not isinstance(question, dict) or not isinstance(question.get("full_text"), str):
        raise row_error(row, "question", f"is {kind(question)}, not an object with full_text.")
    scores = row["score_0"], row["score_1"]
    for column, score in zip(("score_0", "score_1"), scores, strict=True):
        if not isinstance(score, int | float):
            raise row_error(row, column, f"is {kind(score)}, not a number.")
    if scores[0] == scores[1]:
        return None
    answers = [row["answer_0"], row["answer_1"]]
    best = int(scores[1] > scores[0])
    found = {"chosen": answers[best], "rejected": answers[1 - best]}
    return {**row, "prompt": question["full_text"], **found}


LAYOUTS = (
    PairLayout(columns=("winner", "conversation_a", "conversation_b"), pair=_arena, has_prompt=False),
    PairLayout(columns=("question", "answer_0", "answer_1", "score_0", "score_1"), pair=_webgpt, has_prompt=True),
)


def recognise(columns: Collection[str]) -> PairLayout | None:
    """The layout whose columns are all among these, or None."""
    return next((layout for layout in LAYOUTS if set(layout.columns) <= set(columns)), None)
