"""Human feedback rows: pairs of texts, and single labelled answers for KTO."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch.utils.data
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.checks import Finding
from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.supervised import KTODataConfig, PreferenceDataConfig
from openrlhf.data import templates
from openrlhf.data.errors import row_error, text_of
from openrlhf.data.layouts import DATASOURCE, DROPPED, MARGIN
from openrlhf.data.lost_tools import ONLY_CALLS, lost_tools
from openrlhf.data.messages import Message, messages_of, tools_of, transcript_turns
from openrlhf.data.rows import Result, TokenizedRows, contents_of
from openrlhf.data.sft import SFTDataset, SFTRow
from openrlhf.data.templates import Encoded, Passage, cut, fill_template, in_common
from openrlhf.data.tokenizer import Ends
from openrlhf.reporting import notice

# Config sections that set the columns, the templates and `max_len` for pairs.
PairSection = PreferenceDataConfig | KTODataConfig | EvaluatedDataConfig
SAME_TEXT = "whose chosen and rejected text are the same"


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A preferred and a rejected text, each ending with end-of-text.

    `prompt_length` is the number of tokens in the shared prompt, which is not scored, or 0 if no
    prompt is needed. `chosen_context` and `rejected_context` are the positions after the prompt
    whose tokens the assistant did not write; these positions are not scored. Both lists of
    positions are empty unless the texts differ in more than one turn. `margin` is the reward
    difference between the two texts, or 0 if the row has no margin. `datasource` becomes part of
    evaluation metric names.

    Example: the prompt "Q: " with the answers "yes" and "no" (made-up ids) and prompt_length 2:

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
    reference: Sequence[float] = ()  # Σ log π_ref of both answers, once computed

    @property
    def masks(self) -> tuple[list[bool], list[bool]]:
        """Masks of the scored tokens in the chosen and rejected texts. The first token is never
        scored."""
        return (
            self._mask(self.chosen, self.chosen_context),
            self._mask(self.rejected, self.rejected_context),
        )

    def _mask(self, tokens: list[int], context: list[int]) -> list[bool]:
        start = max(1, self.prompt_length)
        mask = [False] * start + [True] * (len(tokens) - start)
        for place in context:
            mask[place] = False
        return mask


CONTEXTS = ("chosen_context", "rejected_context")


def _judged_turns(sides: Sequence[Sequence[Message]], prompt: int) -> list[list[int]]:
    """Return each side's assistant turns, starting at the first difference.

    `prompt` is the number of messages in the prompt, or 0 if the prompt has no column of its own.
    Returns empty lists if only the assistant speaks after the prompt.
    """
    first = min(in_common(*sides), min(map(len, sides)) - 1)
    others_speak = False
    judged: list[list[int]] = []
    for messages in sides:
        turns: list[int] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                others_speak = others_speak or turn >= (prompt or first)
            elif turn >= first:
                turns.append(turn)
        judged.append(turns)
    if not others_speak:
        return [[] for _ in sides]
    return judged


class PreferenceDataset(TokenizedRows[PairRow]):
    """A dataset's preference pairs, tokenized when the object is created.

    A text is the prompt (if `prompt_key` is set) plus the answer, or a full conversation, given as
    plain text or chat messages. Trailing newlines are removed, end-of-text is appended (after a
    space) if it is missing, and the text is truncated to `max_len` tokens, the last of which is
    always end-of-text. Pairs whose texts are equal after truncation are dropped.

    With `needs_prompt`, pairs with a prompt of at least `max_len` − 2 tokens are dropped too.
    Without a `prompt_key`, everything before the last answer of a chat or HH-RLHF transcript is the
    prompt, and other plain texts have no prompt. If a user or a tool speaks after the shared
    prompt, only the assistant turns after the first difference are scored, starting with the turn
    that contains it.

    `summary` counts dropped and truncated pairs. Raises DataError if a column is missing, if rows
    are malformed (the message names the first rows), or if all pairs are dropped.
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
        self.needs_prompt = needs_prompt
        self.ends = Ends.of(tokenizer)
        super().__init__(dataset, tokenizer, data)
        if needs_prompt and not any(self.rows["prompt_length"]):
            notice(
                "The texts do not share a prompt, so their answers begin at the second token. If a "
                "column contains the prompts, pass it as --data.prompt_key."
            )

    @property
    def answer_columns(self) -> dict[str, str]:
        """The columns of both answers, by the names of their flags."""
        return {"chosen_key": self.data.chosen_key, "rejected_key": self.data.rejected_key}

    def contents(self) -> Iterator[bytes]:
        """Yield all pairs as bytes for hashing.

        The bytes match those of earlier releases if all pairs differ only in the last answer.
        """
        unused = [name for name in CONTEXTS if not any(self.rows[name])]
        yield from contents_of(self._fields.remove_columns(unused))

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Return both texts, or the reason for dropping the pair.

        Trailing newlines are removed, and each text ends with end-of-text.
        """
        if DROPPED in row:
            return str(row[DROPPED])
        marks: list[str] = []
        if self.data.apply_chat_template:
            marks = self.ends.marks
            sides = self._conversations(row)
        else:
            sides = self._plain(row)
        if isinstance(sides, str):
            return sides
        space = self.data.space_before_eos
        return [side.closed(self.ends.texts, marks, space=space) for side in sides]

    def _plain(self, row: Mapping[str, Any]) -> list[Passage]:
        prompt = ""
        if self.data.prompt_key:
            prompt = fill_template(self.data.input_template, text_of(row, self.data.prompt_key))
        texts: list[str] = []
        for column in self.answer_columns.values():
            texts.append(prompt + text_of(row, column))
        transcripts = list(map(transcript_turns, texts))
        judged: list[list[int]] = [[], []]
        if self.needs_prompt and all(transcripts):
            sides = [[turn.message for turn in turns] for turns in transcripts]
            before = sum(turn.header < len(prompt) for turn in transcripts[0])
            judged = _judged_turns(sides, before)
        passages: list[Passage] = []
        for text, turns, numbers in zip(texts, transcripts, judged, strict=True):
            answer = len(prompt)
            if turns and not self.data.prompt_key:
                answer = turns[-1].start
            spans = [(answer, len(text))]
            if all(judged):
                spans = [(max(turns[n].start, len(prompt)), turns[n].end) for n in numbers]
            passages.append(Passage(text=text, spans=spans, exchange=all(judged)))
        return passages

    def _conversations(self, row: Mapping[str, Any]) -> list[Passage] | str:
        tools = tools_of(row)
        prompt: list[Message] = []
        if self.data.prompt_key:
            prompt = messages_of(row, self.data.prompt_key, role="user", flag="--data.prompt_key")
        sides: list[list[Message]] = []
        for key, column in self.answer_columns.items():
            answer = messages_of(row, column, role="assistant", flag=f"--data.{key}")
            if not prompt and isinstance(row[column], str) and len(answer) == 1:
                problem = (
                    "is a string, not a list of chat messages. Set --data.prompt_key to the column "
                    "with the question, or omit --data.apply_chat_template."
                )
                raise row_error(row, column, problem)
            sides.append(prompt + answer)
        turns: list[list[int]] = [[], []]
        if self.needs_prompt:
            turns = _judged_turns(sides, len(prompt))
        passages: list[Passage] = []
        columns = self.answer_columns.values()
        for column, messages, judged in zip(columns, sides, turns, strict=True):
            try:
                lost = lost_tools(self.tokenizer, messages, tools)
                if len(messages) - 1 in lost.turns:
                    return ONLY_CALLS
                learned = [turn for turn in judged if turn not in lost.turns]
                side = self._rendered(prompt, messages, learned, tools)
            except ValueError as error:
                raise row_error(row, column, f"{error}.") from error
            passages.append(replace(side, empty=len(judged) - len(learned), lost=lost.first))
        return passages

    def _rendered(
        self, prompt: list[Message], messages: list[Message], judged: list[int], tools: Any
    ) -> Passage:
        if self.needs_prompt and messages[-1]["role"] != "assistant":
            raise ValueError(
                "the last message is not from the assistant, but a pair must end with answers"
            )
        if judged:
            passage = templates.render_conversation(
                self.tokenizer, messages, turns=judged, tools=tools
            )
            return replace(passage.with_ended_turns(self.ends.texts), exchange=True)
        text = templates.render(self.tokenizer, messages, tools=tools)
        answer = self._answer(prompt or messages[:-1], messages, text, tools)
        return Passage(text=text, spans=[(answer, len(text))])

    def _answer(self, prompt: list[Message], messages: list[Message], text: str, tools: Any) -> int:
        """Return the character index where the answer begins.

        If the template rewrites history, return the start of the last answer.
        """
        if not self.needs_prompt:
            return 0
        before = ""
        with suppress(ValueError):  # the template may reject a prompt, e.g. without a user turn
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
        """Return the columns of a tokenized pair, or the reason for dropping it."""
        max_len = self.data.max_len
        limit = max_len - 2
        prompt_length = 0
        better, worse = encoded
        chosen = cut(better.tokens, max_len, self.tokenizer, self.ends.ids)
        rejected = cut(worse.tokens, max_len, self.tokenizer, self.ends.ids)
        chosen_context: list[int] = []
        rejected_context: list[int] = []
        if self.needs_prompt:
            starts: list[int] = []
            for passage, known in zip(passages, encoded, strict=True):
                starts.append(known.tokens_of(passage.spans[0]).start)
            exchange = any(side.exchange for side in passages)
            if limit <= (max(starts) if exchange else min(starts)):
                return f"with a prompt of {limit} tokens or more (--data.max_len {max_len})"
            prompt_length = min(*starts, in_common(chosen, rejected))
            if exchange:
                chosen_context = _context(passages[0], better, prompt_length, len(chosen))
                rejected_context = _context(passages[1], worse, prompt_length, len(rejected))
        if better.tokens == worse.tokens:
            return SAME_TEXT
        if chosen == rejected:
            return f"that differ only after --data.max_len {max_len} tokens"
        return {
            "chosen": chosen,
            "rejected": rejected,
            "prompt_length": prompt_length,
            "margin": _margin(row),
            "datasource": str(row.get(DATASOURCE) or "default"),
            "chosen_context": chosen_context,
            "rejected_context": rejected_context,
            "cut": max(len(better.tokens), len(worse.tokens)) > max_len,
        }


def _context(passage: Passage, known: Encoded, start: int, end: int) -> list[int]:
    """Return the positions from `start` to `end` that lie outside all of the passage's spans."""
    judged: set[int] = set()
    for span in passage.spans:
        judged.update(known.tokens_of(span))
    return sorted(set(range(start, end)) - judged)


def _margin(row: Mapping[str, Any]) -> float:
    """Return a row's margin, or 0 without one.

    Raises DataError if the margin is not a finite number.
    """
    value = row.get(MARGIN)
    if value is None:
        return 0.0
    margin = math.nan
    with suppress(ValueError):
        margin = float(str(value))  # a cell of a CSV file is a string
    if not math.isfinite(margin):
        raise row_error(row, MARGIN, f"is {value!r}, not a finite number.")
    return margin


@dataclass(frozen=True, kw_only=True)
class LabelledRow(SFTRow):
    """A tokenized prompt and answer with a label.

    The answer begins at the first target and ends with end-of-text.
    """

    desirable: bool
    other: list[int] | None = None  # another row's answer, which KTO's KL term uses
    other_mask: list[bool] = field(default_factory=list)  # loss mask of the other answer

    @property
    def prompt_length(self) -> int:
        """The number of tokens in the prompt."""
        return self.loss_mask.index(True)

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]


class LabelledDataset(SFTDataset):
    """A dataset's labelled answers, tokenized when the object is created.

    Texts are built as in `SFTDataset`, whose response is called the answer here.

    Raises DataError if a column is missing, if rows or labels are malformed (the message names the
    first rows), or if all rows are dropped.
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
        """Return the SFT columns and the label, or the reason for dropping the row."""
        label = _label(row, self.data.label_key)
        result = super().columns(row, passages, encoded)
        if isinstance(result, str):
            return result
        return {**result, "desirable": label}


def check_both_labels(rows: LabelledDataset, *, column: str) -> list[Finding]:
    """Return a notice if all kept rows have the same label."""
    if 0 < rows.desirable < len(rows):
        return []
    label = "desirable" if rows.desirable else "undesirable"
    seen = (
        f"All {len(rows)} rows are {label} (--data.label_key {column}), but KTO needs both labels."
    )
    fix = "Add rows with the other label, or train on the answers with `openrlhf sft`."
    return [Finding(seen, fix)]


def _label(row: Mapping[str, Any], column: str) -> bool:
    """Return whether a row is desirable. Raises DataError if the value is not a label."""
    value = row[column]
    label = str(value).lower()
    if label in ("1", "true", "1.0"):
        return True
    if label in ("0", "false", "0.0"):
        return False
    problem = f"is {value!r}, not a label: 1 or true (desirable), 0 or false (undesirable)."
    raise row_error(row, column, problem)


class BothAnswers(torch.utils.data.Dataset[LabelledRow]):
    """Preference pairs as labelled rows: chosen answers are desirable, rejected answers are not."""

    def __init__(self, pairs: PreferenceDataset) -> None:
        self.pairs = pairs
        self.contents = pairs.contents
        self.summary = f"{pairs.summary} Each answer of a pair becomes a separate row."

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> LabelledRow:
        row = self.pairs[index // 2]
        chosen_mask, rejected_mask = row.masks
        if index % 2:
            return LabelledRow(tokens=row.rejected, loss_mask=rejected_mask, desirable=False)
        return LabelledRow(tokens=row.chosen, loss_mask=chosen_mask, desirable=True)
