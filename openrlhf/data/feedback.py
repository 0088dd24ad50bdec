"""Rows of human feedback: pairs of a preferred and a rejected text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.data.errors import DataError, check_columns, kind, row_error, text_of
from openrlhf.data.layouts import PairLayout, recognise
from openrlhf.data.prompts import DATASOURCE
from openrlhf.data.rows import Columns, as_rows, kept, map_rows, number_rows
from openrlhf.data.templates import (
    Encoded,
    Message,
    encode,
    fill_template,
    in_common,
    render,
    render_conversation,
    to_messages,
)
from openrlhf.data.tokenizer import require_chat_template

FEATURES = Features(
    {
        "chosen": List(Value("int32")),
        "rejected": List(Value("int32")),
        "prompt_length": Value("int32"),
        "margin": Value("float64"),
        "datasource": Value("string"),
        "dropped": Value("string"),  # the reason, or "" for a pair that is kept
        "cut": Value("bool"),
    }
)
MARGIN = "margin"
SAME_TEXT, TIE = "whose chosen and rejected text are the same", "that are ties"


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A preferred and a rejected text, each ending with end-of-text.

    `prompt_length`: tokens that both begin with and that are not judged; 0 where no prompt was asked
    for. `margin`: by how much the first is better, in units of the reward; 0 where nothing is said.
    `datasource` names evaluation metrics.

    Example, the prompt "Q: " and the answers "yes" and "no" (ids made up), prompt_length 2:

        chosen    [4, 7, 9, 2]     Q  :  ▁yes  <eos>
        rejected  [4, 7, 8, 2]     Q  :  ▁no   <eos>
    """

    chosen: list[int]
    rejected: list[int]
    prompt_length: int = 0
    margin: float = 0.0
    datasource: str = "default"


class PreferenceDataset(torch.utils.data.Dataset[PairRow]):
    """The pairs of a dataset as tokens, all made when it is created.

    A text is the prompt (where `prompt_key` is set) and the answer, or a whole conversation, plain
    or as chat messages. It loses its trailing newlines, ends with end-of-text (after a space where
    that was missing), and is cut at its end to `max_len` tokens, the last of which is always
    end-of-text. A pair whose texts are then the same says nothing and is left out; so is, with
    `needs_prompt`, one with a prompt of `max_len` − 2 tokens or more. `summary` counts them, and the
    pairs that were cut. `needs_prompt` also makes a chat's prompt what comes before its last answer,
    where no `prompt_key` is set; plain texts without one have no prompt. Where the chosen column is
    missing, the columns of some public datasets are recognised (`layouts`), and their ties are left
    out. Raises DataError for a missing column, for a malformed row (naming it), and where no pair is
    left.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        prompt_key: str | None = None,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        input_template: str | None = None,
        apply_chat_template: bool = False,
        needs_prompt: bool = False,
    ) -> None:
        layout = None if chosen_key in dataset.column_names else recognise(dataset.column_names)
        if layout:
            prompt_key = "prompt" if layout.has_prompt else None
            chosen_key, rejected_key = "chosen", "rejected"
        flags = {"--data.prompt_key": prompt_key, "--data.chosen_key": chosen_key, "--data.rejected_key": rejected_key}
        if not layout:
            check_columns(dataset.column_names, flags)
        if apply_chat_template:
            require_chat_template(tokenizer)
        encoder = _Encoder(
            tokenizer=tokenizer,
            max_len=max_len,
            layout=layout,
            prompt_key=prompt_key,
            answer_keys=(chosen_key, rejected_key),
            input_template=input_template,
            chat=apply_chat_template,
            needs_prompt=needs_prompt,
        )
        used = list(layout.columns) if layout else [name for name in flags.values() if name]
        used += [name for name in (MARGIN, DATASOURCE) if name in dataset.column_names]
        rows = map_rows(number_rows(dataset), used, encoder, FEATURES, "Tokenizing")
        reasons = list(rows["dropped"])
        self.summary = kept(Counter(reasons), "pairs")
        if cut := sum(rows["cut"]):
            self.summary += f" {cut} of those kept were cut to {max_len} tokens (--data.max_len)."
        usable = [number for number, reason in enumerate(reasons) if not reason]
        if not usable:
            advice = "Look at --data.chosen_key, --data.rejected_key and --data.max_len."
            raise DataError(f"No pair is left to train on: {self.summary} {advice}")
        columns = ["chosen", "rejected", "prompt_length", "margin", "datasource"]
        self._rows = rows.select(usable).select_columns(columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PairRow:
        return PairRow(**self._rows[index])


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A prompt and an answer, and the character where the answer begins."""

    text: str
    answer: int


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """Batches of columns to the columns of `FEATURES`."""

    tokenizer: PreTrainedTokenizerBase
    max_len: int
    layout: PairLayout | None
    prompt_key: str | None
    answer_keys: tuple[str, str]
    input_template: str | None
    chat: bool
    needs_prompt: bool

    def __call__(self, columns: Columns) -> Columns:
        rows = [self.layout.pair(row) if self.layout else row for row in as_rows(columns)]
        pairs = [[self._text(row, key) for key in self.answer_keys] if row else [] for row in rows]
        encoded = iter(encode(self.tokenizer, [text.text for pair in pairs for text in pair]))
        results = [
            self._tokens(row, pair, [next(encoded), next(encoded)]) if row else _drop(TIE)
            for row, pair in zip(rows, pairs, strict=True)
        ]
        return {name: [result[name] for result in results] for name in FEATURES}

    def _text(self, row: Mapping[str, Any], column: str) -> _Text:
        """Prompt and answer, without trailing newlines and with end-of-text."""
        text, answer = self._conversation(row, column) if self.chat else self._plain(row, column)
        bare, eos = text.rstrip("\n"), str(self.tokenizer.eos_token)
        closed = bare if bare.endswith(eos) else f"{bare} {eos}"
        return _Text(text=closed, answer=answer)

    def _plain(self, row: Mapping[str, Any], column: str) -> tuple[str, int]:
        prompt = ""
        if self.prompt_key:
            prompt = fill_template(self.input_template, text_of(row, self.prompt_key))
        return prompt + text_of(row, column), len(prompt)

    def _conversation(self, row: Mapping[str, Any], column: str) -> tuple[str, int]:
        prompt = _messages(row, self.prompt_key, "user") if self.prompt_key else []
        if not prompt and isinstance(row[column], str):
            problem = (
                "is a string, not a list of chat messages: set --data.prompt_key to the column with "
                "the question, or leave out --data.apply_chat_template."
            )
            raise row_error(row, column, problem)
        messages = prompt + _messages(row, column, "assistant")
        try:
            text = render(self.tokenizer, messages)
            return text, self._answer(prompt or messages[:-1], messages, text)
        except ValueError as error:
            raise row_error(row, column, f"{error}.") from error

    def _answer(self, prompt: list[Message], messages: list[Message], text: str) -> int:
        """The character where the answer begins; the last one of a template that rewrites history."""
        if not self.needs_prompt:
            return 0
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message is not the assistant's, so there is no answer to judge")
        before = render(self.tokenizer, prompt, add_generation_prompt=True) if prompt else ""
        if text.startswith(before):
            return len(before)
        return render_conversation(self.tokenizer, messages, every_turn=False).response

    def _tokens(self, row: Mapping[str, Any], texts: list[_Text], pair: list[Encoded]) -> dict[str, Any]:
        """The columns of a pair that is tokenized."""
        margin, limit, prompt_length = _margin(row), self.max_len - 2, 0
        chosen, rejected = map(self._cut, pair)
        if self.needs_prompt:
            spans = [(text.answer, len(text.text)) for text in texts]
            starts = [known.tokens_of(span).start for known, span in zip(pair, spans, strict=True)]
            if min(starts) >= limit:
                return _drop(f"with a prompt of {limit} tokens or more (--data.max_len {self.max_len})")
            prompt_length = min(*starts, in_common(chosen, rejected))
        if pair[0].tokens == pair[1].tokens:
            return _drop(SAME_TEXT)
        if chosen == rejected:
            return _drop(f"that differ only after --data.max_len {self.max_len} tokens")
        return {
            "chosen": chosen,
            "rejected": rejected,
            "prompt_length": prompt_length,
            "margin": margin,
            "datasource": str(row.get(DATASOURCE) or "default"),
            "dropped": "",
            "cut": any(len(known.tokens) > self.max_len for known in pair),
        }

    def _cut(self, known: Encoded) -> list[int]:
        end_of_text: Any = self.tokenizer.eos_token_id
        return [*known.tokens[: self.max_len][:-1], end_of_text]


def _drop(reason: str) -> dict[str, Any]:
    nothing = {"chosen": [], "rejected": [], "prompt_length": 0, "margin": 0.0, "datasource": ""}
    return nothing | {"dropped": reason, "cut": False}


def _messages(row: Mapping[str, Any], column: str, role: str) -> list[Message]:
    try:
        return to_messages(row[column], role=role)
    except ValueError as error:
        raise row_error(row, column, f"{error}.") from error


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get(MARGIN)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise row_error(row, MARGIN, f"is {kind(value)}, not a number.")
    if not math.isfinite(value):
        raise row_error(row, MARGIN, f"is {value}, which is no margin.")
    return float(value)
