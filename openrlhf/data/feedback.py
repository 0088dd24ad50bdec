"""Rows of human feedback: pairs of a preferred and a rejected text; and for KTO answers, each desirable or not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.utils.data
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.supervised import KTODataConfig, PreferenceDataConfig
from openrlhf.data import templates
from openrlhf.data.errors import kind, notice, row_error, text_of
from openrlhf.data.layouts import DATASOURCE, DROPPED, MARGIN
from openrlhf.data.rows import Result, TokenizedRows
from openrlhf.data.sft import SFTDataset, SFTRow
from openrlhf.data.templates import Encoded, Message, Passage, cut, fill_template, in_common, messages_of

PairSection = PreferenceDataConfig | KTODataConfig | EvaluatedDataConfig  # columns, templates and `max_len` of pairs
SAME_TEXT = "whose chosen and rejected text are the same"


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A preferred and a rejected text, each ending with end-of-text.

    `prompt_length`: tokens of the common prompt, which are not judged; 0 unless a prompt was asked for. `margin`: by
    how much the preferred text is better, in units of the reward; 0 if the row has no margin. `datasource` names
    evaluation metrics.

    Example, the prompt "Q: " and the answers "yes" and "no" (ids made up), prompt_length 2:

        chosen    [4, 7, 9, 2]     Q  :  ▁yes  <eos>
        rejected  [4, 7, 8, 2]     Q  :  ▁no   <eos>
    """

    chosen: list[int]
    rejected: list[int]
    prompt_length: int = 0
    margin: float = 0.0
    datasource: str = "default"
    reference: Sequence[float] = ()  # Σ log π_ref of the two answers, once it is known


class PreferenceDataset(TokenizedRows[PairRow]):
    """The pairs of a dataset as tokens, made when the object is created.

    A text is the prompt (if `prompt_key` is set) and the answer, or a whole conversation, plain or as chat messages.
    The text loses its trailing newlines, ends with end-of-text (after a space if end-of-text was missing), and is cut
    to `max_len` tokens, the last of which is always end-of-text. Pairs with two equal texts after the cut are dropped.

    With `needs_prompt`, pairs with a prompt of `max_len` − 2 tokens or more are dropped too. Without a `prompt_key`,
    the prompt of a chat is everything before the last answer, also of a transcript of HH-RLHF, and other plain texts
    have no prompt.

    `summary` counts dropped and cut pairs. Raises DataError for a missing column, for malformed rows (naming the first),
    and if no pair is left.
    """

    row: ClassVar = PairRow
    keys = ("prompt_key", "chosen_key", "rejected_key")
    what: ClassVar = "pair"

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: PairSection, *, needs_prompt: bool = False
    ) -> None:
        self.needs_prompt = needs_prompt
        super().__init__(dataset, tokenizer, data)
        if needs_prompt and not any(self.rows["prompt_length"]):
            notice(
                "The texts have no common prompt: their answers begin with the second token. --data.prompt_key names a column with prompts."
            )

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Prompt and answer of both texts, without trailing newlines and with end-of-text."""
        if DROPPED in row:
            return str(row[DROPPED])
        split = self._conversation if self.data.apply_chat_template else self._plain
        texts = [split(row, column) for column in (self.data.chosen_key, self.data.rejected_key)]
        end_of_text = str(self.tokenizer.eos_token)
        return [Passage(text=text, spans=[], response=answer).closed(end_of_text) for text, answer in texts]

    def _plain(self, row: Mapping[str, Any], column: str) -> tuple[str, int]:
        text = text_of(row, column)
        if self.data.prompt_key:
            prompt = fill_template(self.data.input_template, text_of(row, self.data.prompt_key))
            return prompt + text, len(prompt)
        turns = list(templates.TRANSCRIPT.finditer(text))  # of HH-RLHF: the last one is the answer
        return text, turns[-1].end() if turns and not turns[0].start() else 0

    def _conversation(self, row: Mapping[str, Any], column: str) -> tuple[str, int]:
        key = self.data.prompt_key
        prompt = messages_of(row, key, role="user", flag="--data.prompt_key") if key else []
        side = "chosen" if column == self.data.chosen_key else "rejected"
        answer, tools = messages_of(row, column, role="assistant", flag=f"--data.{side}_key"), templates.tools_of(row)
        if not prompt and isinstance(row[column], str) and len(answer) == 1:
            problem = (
                "is a string, not a list of chat messages: set --data.prompt_key to the column with "
                "the question, or leave out --data.apply_chat_template."
            )
            raise row_error(row, column, problem)
        messages = prompt + answer
        try:
            text = templates.render(self.tokenizer, messages, tools=tools)
            return text, self._answer(prompt or messages[:-1], messages, text, tools)
        except ValueError as error:
            raise row_error(row, column, f"{error}.") from error

    def _answer(self, prompt: list[Message], messages: list[Message], text: str, tools: Any) -> int:
        """The character where the answer begins; the start of the last answer if the template rewrites history."""
        if not self.needs_prompt:
            return 0
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message is not the assistant's, so there is no answer to judge")
        before = templates.render(self.tokenizer, prompt, add_generation_prompt=True, tools=tools) if prompt else ""
        if text.startswith(before):
            return len(before)
        return templates.render_conversation(self.tokenizer, messages, tools=tools).response

    def columns(self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]) -> Result:
        """The columns of a tokenized pair, or the reason why the pair is dropped."""
        margin, limit, prompt_length = _margin(row), self.data.max_len - 2, 0
        chosen, rejected = (cut(known.tokens, self.data.max_len, self.tokenizer) for known in encoded)
        if self.needs_prompt:
            spans = [(text.response, len(text.text)) for text in passages]
            starts = [known.tokens_of(span).start for known, span in zip(encoded, spans, strict=True)]
            if min(starts) >= limit:
                return f"with a prompt of {limit} tokens or more (--data.max_len {self.data.max_len})"
            prompt_length = min(*starts, in_common(chosen, rejected))
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
            "cut": any(len(known.tokens) > self.data.max_len for known in encoded),
        }


def _margin(row: Mapping[str, Any]) -> float:
    if (value := row.get(MARGIN)) is None:
        return 0.0
    if kind(value) != "a number" or not math.isfinite(value):
        raise row_error(row, MARGIN, f"is {value!r}, not a finite number.")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class LabelledRow(SFTRow):
    """A prompt and an answer, as tokens; the answer begins at the first target, and ends with end-of-text."""

    desirable: bool
    other: list[int] | None = None  # the answer of another row, for KTO's KL

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.loss_mask.index(True)


class LabelledDataset(SFTDataset):
    """The rows of a dataset as tokens with labels. Texts are those of `SFTDataset`: the answer is the response.

    Raises DataError for a missing column, for malformed rows or labels (naming the first), and if no row is left.
    """

    row: ClassVar = LabelledRow
    keys = ("input_key", "output_key", "label_key")

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: KTODataConfig) -> None:
        super().__init__(dataset, tokenizer, data)
        desirable = sum(self.rows["desirable"])
        self.summary += f" {desirable} are desirable, {len(self) - desirable} are not."

    def columns(self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]) -> Result:
        """Those of SFT, and the label."""
        label, result = _label(row, self.data.label_key), super().columns(row, passages, encoded)
        return result if isinstance(result, str) else {**result, "desirable": label}


def _label(row: Mapping[str, Any], column: str) -> bool:
    value = row[column]
    if str(value).lower() not in ("1", "0", "true", "false", "1.0", "0.0"):
        raise row_error(row, column, f"is {value!r}, which is no label: 1 or true (desirable), 0 or false.")
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
        tokens, prompt = row.rejected if rejected else row.chosen, max(1, row.prompt_length)
        mask = [False] * prompt + [True] * (len(tokens) - prompt)
        return LabelledRow(tokens=tokens, loss_mask=mask, desirable=not rejected)
