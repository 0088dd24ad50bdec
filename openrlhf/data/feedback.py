"""Rows of human feedback: pairs of a preferred and a rejected text; and for KTO answers, each
desirable or not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch.utils.data
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.flags import notice
from openrlhf.config.supervised import KTODataConfig, PreferenceDataConfig
from openrlhf.data import templates
from openrlhf.data.errors import kind, row_error, text_of
from openrlhf.data.findings import Finding, Level
from openrlhf.data.layouts import DATASOURCE, DROPPED, MARGIN
from openrlhf.data.lost_tools import ONLY_CALLS, empty_calls, lost_tool
from openrlhf.data.rows import Result, TokenizedRows, contents_of
from openrlhf.data.sft import SFTDataset, SFTRow
from openrlhf.data.templates import (
    Encoded,
    Message,
    Passage,
    Span,
    cut,
    fill_template,
    in_common,
    messages_of,
)
from openrlhf.data.tokenizer import Ends

PairSection = (
    PreferenceDataConfig | KTODataConfig | EvaluatedDataConfig
)  # columns, templates and `max_len` of pairs
SAME_TEXT = "whose chosen and rejected text are the same"


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A preferred and a rejected text, each ending with end-of-text.

    `prompt_length`: tokens of the common prompt, which are not judged; 0 unless a prompt was asked
    for. `chosen_context` and `rejected_context`: positions after the prompt that are not judged
    either, because someone other than the assistant wrote them; empty unless the texts differ by a
    whole exchange. `margin`: by how much the preferred text is better, in units of the reward; 0 if
    the row has no margin. `datasource` names evaluation metrics.

    Example, the prompt "Q: " and the answers "yes" and "no" (ids made up), prompt_length 2:

        chosen    [4, 7, 9, 2]     Q  :  ▁yes  <eos>
        rejected  [4, 7, 8, 2]     Q  :  ▁no   <eos>
    """

    chosen: list[int]
    rejected: list[int]
    prompt_length: int = 0
    margin: float = 0.0
    datasource: str = "default"
    chosen_context: list[int] = field(default_factory=list)
    rejected_context: list[int] = field(default_factory=list)
    reference: Sequence[float] = ()  # Σ log π_ref of the two answers, once it is known

    @property
    def masks(self) -> tuple[list[bool], list[bool]]:
        """The judged tokens of the chosen and of the rejected text. The first token of a text is
        never judged.
        """
        return self._mask(self.chosen, self.chosen_context), self._mask(
            self.rejected, self.rejected_context
        )

    def _mask(self, tokens: list[int], context: list[int]) -> list[bool]:
        start = max(1, self.prompt_length)
        mask = [False] * start + [True] * (len(tokens) - start)
        for place in context:
            mask[place] = False
        return mask


CONTEXTS = ("chosen_context", "rejected_context")


@dataclass(frozen=True, kw_only=True)
class Side(Passage):
    """A text of a pair, with the spans that are judged."""

    exchange: bool = (
        False  # someone other than the assistant speaks after the prompt that both texts share
    )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a transcript of HH-RLHF: the speaker, and where the words are, in characters."""

    role: str
    words: str = ""
    header: int = field(compare=False)
    start: int = field(compare=False)
    end: int = field(compare=False)


def transcript_turns(text: str) -> list[Turn]:
    """Return the turns of a transcript of HH-RLHF; none if the text does not begin like one."""
    headers = list(templates.TRANSCRIPT.finditer(text))
    if not headers or headers[0].start():
        return []
    ends = [following.start() for following in headers[1:]] + [len(text)]
    turns: list[Turn] = []
    for header, end in zip(headers, ends, strict=True):
        role, words = templates.SPEAKERS[header[1]], text[header.end() : end]
        turns.append(
            Turn(role=role, words=words, header=header.start(), start=header.end(), end=end)
        )
    return turns


def _judged_spans(sides: list[list[Turn]], prompt: int) -> list[list[Span]]:
    """Return the assistant's spans of each side from the first difference on, if others speak there
    too; else none.

    `prompt` is the number of characters of the prompt column.
    """
    if not all(sides):
        return []
    first = min(in_common(*sides), *(len(turns) - 1 for turns in sides))
    after = [[turn for turn in turns if turn.header >= prompt] for turns in sides]
    if not prompt:
        after = [turns[first:] for turns in sides]
    if not any(turn.role == "user" for turns in after for turn in turns):
        return []
    spans: list[list[Span]] = []
    for turns in sides:
        answers = [turn for turn in turns[first:] if turn.role == "assistant" and turn.end > prompt]
        spans.append([(max(turn.start, prompt), turn.end) for turn in answers])
    return spans if all(spans) else []


class PreferenceDataset(TokenizedRows[PairRow]):
    """The pairs of a dataset as tokens, made when the object is created.

    A text is the prompt (if `prompt_key` is set) and the answer, or a whole conversation, plain or
    as chat messages. The text loses its trailing newlines, ends with end-of-text (after a space if
    end-of-text was missing), and is cut to `max_len` tokens, the last of which is always
    end-of-text. Pairs with two equal texts after the cut are dropped.

    With `needs_prompt`, pairs with a prompt of `max_len` − 2 tokens or more are dropped too.
    Without a `prompt_key`, the prompt of a chat is everything before the last answer, also of a
    transcript of HH-RLHF, and other plain texts have no prompt. If someone other than the assistant
    speaks after the prompt that both texts share, only the assistant's turns from the first
    difference on are judged.

    `summary` counts dropped and cut pairs. Raises DataError for a missing column, for malformed
    rows (naming the first), and if no pair is left.
    """

    row: ClassVar = PairRow
    keys = ("prompt_key", "chosen_key", "rejected_key")
    what: ClassVar = "pair"

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        data: PairSection,
        *,
        needs_prompt: bool = False,
    ) -> None:
        self.needs_prompt, self.ends = needs_prompt, Ends.of(tokenizer)
        super().__init__(dataset, tokenizer, data)
        if needs_prompt and not any(self.rows["prompt_length"]):
            notice(
                "The texts have no common prompt: their answers begin with the second token. --data.prompt_key names a column with prompts."
            )

    def contents(self) -> Iterator[bytes]:
        """All pairs as bytes, to be hashed. Without an exchange in any pair these are the bytes of
        earlier releases.
        """
        unused = [name for name in CONTEXTS if not any(self.rows[name])]
        yield from contents_of(self._fields.remove_columns(unused))

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Prompt and answer of both texts, without trailing newlines and with end-of-text."""
        if DROPPED in row:
            return str(row[DROPPED])
        read = self._conversations if self.data.apply_chat_template else self._plain
        sides = read(row)
        if isinstance(sides, str):
            return sides
        marks = self.ends.marks if self.data.apply_chat_template else []
        return [
            side.closed(self.ends.texts, marks, space=self.data.space_before_eos) for side in sides
        ]

    def _plain(self, row: Mapping[str, Any]) -> list[Side]:
        prompt = ""
        if self.data.prompt_key:
            prompt = fill_template(self.data.input_template, text_of(row, self.data.prompt_key))
        texts = [
            prompt + text_of(row, column)
            for column in (self.data.chosen_key, self.data.rejected_key)
        ]
        turns = [transcript_turns(text) for text in texts]
        if self.needs_prompt and (spans := _judged_spans(turns, len(prompt))):
            sides = zip(texts, spans, strict=True)
            return [
                Side(text=text, spans=judged, response=judged[0][0], exchange=True)
                for text, judged in sides
            ]
        passages: list[Side] = []
        for text, said in zip(texts, turns, strict=True):
            answer = len(prompt)
            if said and not self.data.prompt_key:
                answer = said[-1].start
            passages.append(Side(text=text, spans=[(answer, len(text))], response=answer))
        return passages

    def _conversations(self, row: Mapping[str, Any]) -> list[Side] | str:
        key, tools = self.data.prompt_key, templates.tools_of(row)
        prompt = messages_of(row, key, role="user", flag="--data.prompt_key") if key else []
        columns = (self.data.chosen_key, self.data.rejected_key)
        sides = [
            prompt + self._answer_messages(row, column, alone=not prompt) for column in columns
        ]
        passages: list[Side] = []
        for column, messages, judged in zip(
            columns, sides, self._judged_messages(prompt, sides), strict=True
        ):
            last = len(messages) - 1
            try:
                empty = empty_calls(self.tokenizer, messages, judged or [last], tools=tools)
                if last in empty:
                    return ONLY_CALLS
                learned = [turn for turn in judged if turn not in empty]
                side = self._rendered(prompt, messages, learned, tools)
                lost = lost_tool(self.tokenizer, messages, side.text, tools=tools)
                passages.append(replace(side, empty=len(empty), lost=lost))
            except ValueError as error:
                raise row_error(row, column, f"{error}.") from error
        return passages

    def _answer_messages(
        self, row: Mapping[str, Any], column: str, *, alone: bool
    ) -> list[Message]:
        side = "chosen" if column == self.data.chosen_key else "rejected"
        answer = messages_of(row, column, role="assistant", flag=f"--data.{side}_key")
        if alone and isinstance(row[column], str) and len(answer) == 1:
            problem = (
                "is a string, not a list of chat messages: set --data.prompt_key to the column with "
                "the question, or leave out --data.apply_chat_template."
            )
            raise row_error(row, column, problem)
        return answer

    def _judged_messages(
        self, prompt: list[Message], sides: list[list[Message]]
    ) -> list[list[int]]:
        """The assistant's turns of each side from the first difference on, if others speak there
        too; else none.
        """
        if not self.needs_prompt:
            return [[] for _ in sides]
        shortest = min(map(len, sides))
        first = max(len(prompt), min(in_common(*sides), shortest - 1))
        begin = len(prompt) if prompt else first
        if all(message["role"] == "assistant" for side in sides for message in side[begin:]):
            return [[] for _ in sides]
        return [
            [turn for turn in range(first, len(side)) if side[turn]["role"] == "assistant"]
            for side in sides
        ]

    def _rendered(
        self, prompt: list[Message], messages: list[Message], judged: list[int], tools: Any
    ) -> Side:
        if self.needs_prompt and messages[-1]["role"] != "assistant":
            raise ValueError(
                "the last message is not the assistant's, so there is no answer to judge"
            )
        if judged:
            passage = templates.render_conversation(
                self.tokenizer, messages, turns=judged, tools=tools
            )
            passage = passage.with_ended_turns(self.ends.texts)
            return Side(
                text=passage.text, spans=passage.spans, response=passage.spans[0][0], exchange=True
            )
        text = templates.render(self.tokenizer, messages, tools=tools)
        answer = self._answer(prompt or messages[:-1], messages, text, tools)
        return Side(text=text, spans=[(answer, len(text))], response=answer)

    def _answer(self, prompt: list[Message], messages: list[Message], text: str, tools: Any) -> int:
        """The character where the answer begins; the start of the last answer if the template
        rewrites history.
        """
        if not self.needs_prompt:
            return 0
        with suppress(
            ValueError
        ):  # a beginning that the template forbids, for example without a user
            before = ""
            if prompt:
                before = templates.render(
                    self.tokenizer, prompt, add_generation_prompt=True, tools=tools
                )
            if text.startswith(before):
                return len(before)
        return templates.render_conversation(self.tokenizer, messages, tools=tools).response

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """The columns of a tokenized pair, or the reason why the pair is dropped."""
        margin, limit, prompt_length = _margin(row), self.data.max_len - 2, 0
        chosen, rejected = (
            cut(known.tokens, self.data.max_len, self.tokenizer, self.ends.ids) for known in encoded
        )
        contexts: list[list[int]] = [[], []]
        if self.needs_prompt:
            starts = [
                known.tokens_of(text.spans[0]).start
                for known, text in zip(encoded, passages, strict=True)
            ]
            exchange = any(isinstance(text, Side) and text.exchange for text in passages)
            longest = max(starts) if exchange else min(starts)
            if longest >= limit:
                return (
                    f"with a prompt of {limit} tokens or more (--data.max_len {self.data.max_len})"
                )
            prompt_length = min(*starts, in_common(chosen, rejected))
            if exchange:
                sides = zip(passages, encoded, (chosen, rejected), strict=True)
                contexts = [
                    _context(text, known, range(prompt_length, len(kept)))
                    for text, known, kept in sides
                ]
        if encoded[0].tokens == encoded[1].tokens:
            return SAME_TEXT
        if chosen == rejected:
            return f"that differ only after --data.max_len {self.data.max_len} tokens"
        return {
            "chosen": chosen,
            "rejected": rejected,
            "prompt_length": prompt_length,
            "margin": margin,
            "datasource": str(row.get(DATASOURCE) or "default"),
            **dict(zip(CONTEXTS, contexts, strict=True)),
            "cut": any(len(known.tokens) > self.data.max_len for known in encoded),
        }


def _context(passage: Passage, known: Encoded, answer: range) -> list[int]:
    """Return the places of `answer` whose tokens are in none of the passage's spans."""
    judged: set[int] = set()
    for span in passage.spans:
        judged.update(known.tokens_of(span))
    return [place for place in answer if place not in judged]


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get(MARGIN)
    if value is None:
        return 0.0
    margin = math.nan
    if kind(value) in ("a number", "a string"):  # a cell of a CSV file is a string
        with suppress(ValueError):
            margin = float(value)
    if not math.isfinite(margin):
        raise row_error(row, MARGIN, f"is {value!r}, not a finite number.")
    return margin


@dataclass(frozen=True, kw_only=True)
class LabelledRow(SFTRow):
    """A prompt and an answer, as tokens; the answer begins at the first target, and ends with
    end-of-text.
    """

    desirable: bool
    other: list[int] | None = None  # the answer of another row, for KTO's KL
    other_mask: list[bool] = field(default_factory=list)  # the targets of the other answer

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.loss_mask.index(True)

    @property
    def answer(self) -> list[int]:
        """Everything after the prompt."""
        return self.tokens[self.prompt_length :]


class LabelledDataset(SFTDataset):
    """The rows of a dataset as tokens with labels. Texts are those of `SFTDataset`: the answer is
    the response.

    Raises DataError for a missing column, for malformed rows or labels (naming the first), and if
    no row is left.
    """

    row: ClassVar = LabelledRow
    keys = ("input_key", "output_key", "label_key")

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: KTODataConfig
    ) -> None:
        super().__init__(dataset, tokenizer, data)
        self.desirable: int = sum(self.rows["desirable"])  # rows
        self.summary += f" {self.desirable} are desirable, {len(self) - self.desirable} are not."

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Those of SFT, and the label."""
        label, result = _label(row, self.data.label_key), super().columns(row, passages, encoded)
        return result if isinstance(result, str) else {**result, "desirable": label}


def check_both_labels(rows: LabelledDataset, *, column: str) -> Finding:
    """Return a warning if the rows that are left are all desirable, or all undesirable."""
    if 0 < rows.desirable < len(rows):
        seen = f"{rows.desirable} of {len(rows)} rows are desirable."
        return Finding(check="labels", level=Level.PASS, seen=seen)
    if rows.desirable:
        label = "desirable"
        fix = "Add rows with the label 0 or false, or train on the answers with `openrlhf sft`."
    else:
        label = "undesirable"
        fix = "Add rows with the label 1 or true."
    seen = f"All {len(rows)} rows are {label} (--data.label_key {column}): KTO has nothing to contrast."
    return Finding(check="labels", level=Level.WARNING, seen=seen, fix=fix)


def _label(row: Mapping[str, Any], column: str) -> bool:
    value = row[column]
    if str(value).lower() not in ("1", "0", "true", "false", "1.0", "0.0"):
        raise row_error(
            row, column, f"is {value!r}, which is no label: 1 or true (desirable), 0 or false."
        )
    return str(value).lower() in ("1", "true", "1.0")


class BothAnswers(torch.utils.data.Dataset[LabelledRow]):
    """Pairs as labelled rows: the chosen answer is desirable, the rejected one is not."""

    def __init__(self, pairs: PreferenceDataset) -> None:
        self.pairs, self.contents = pairs, pairs.contents
        self.summary = f"{pairs.summary} Both answers of a pair are rows of their own."

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> LabelledRow:
        pair, rejected = divmod(index, 2)
        row = self.pairs[pair]
        tokens = row.rejected if rejected else row.chosen
        return LabelledRow(tokens=tokens, loss_mask=row.masks[rejected], desirable=not rejected)
