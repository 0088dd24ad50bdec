"""Rows for reinforcement learning: a rendered prompt and the data its reward needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.errors import ROW, SOURCE, origin_of, row_error, text_of
from openrlhf.data.layouts import DATASOURCE
from openrlhf.data.lost_tools import lost_tools
from openrlhf.data.messages import messages_of, tools_of
from openrlhf.data.rows import Result, TokenizedRows, contents_of, number_rows
from openrlhf.data.sft import SFTDataset
from openrlhf.data.templates import Encoded, Passage, cut, fill_template, render
from openrlhf.data.text_files import without_added_nulls
from openrlhf.reporting import notice

# Config sections that set the columns and templates for prompts.
PromptSection = RLDataConfig | EvaluatedDataConfig | InferenceDataConfig


class PromptDataset(TokenizedRows[Prompt]):
    """A dataset's prompts, rendered when the object is created. No row is dropped.

    With `apply_chat_template`, the input column contains strings (a user message) or lists of
    messages. The messages are rendered up to the last turn that is not the assistant's, with the
    tools in the `tools` column and a generation prompt. Otherwise the column contains strings,
    which are put into `input_template`. A missing column defaults to the label "", the data source
    "default" or no images. A prompt's index is its row number; a source replaces it with the number
    of the draw. Raises DataError if a column is missing, or if prompts are malformed or empty (the
    message names the first rows).
    """

    row: ClassVar = Prompt

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        data: PromptSection,
        *,
        image_key: str = "images",
    ) -> None:
        self.keys = data.columns
        rows = number_rows(dataset)
        super().__init__(rows, tokenizer, data)
        self.image_key = image_key
        answered = sum(self.rows["rewritten"])
        if answered:
            notice(
                f"{answered} prompts end with assistant turns, which are removed: the policy "
                "answers instead."
            )
        extras = (data.label_key, image_key, SOURCE, ROW)
        self._extras = rows.select_columns([name for name in rows.column_names if name in extras])

    def lengths(self) -> list[int]:
        """Return the number of tokens in each prompt."""
        return list(map(len, self._fields["tokens"]))

    def labels(self) -> list[Any]:
        """Return each prompt's label, or an empty list without a label column."""
        if not self.data.label_key:
            return []
        return list(self._extras[self.data.label_key])

    def origin(self, index: int) -> str:
        """Return a prompt's dataset and row number as text."""
        return origin_of(self._extras[index])

    def __getitem__(self, index: int) -> Prompt:
        extras = self._extras[index]
        key = self.data.label_key
        label: Any = ""
        if key:
            label = without_added_nulls(extras[key], self._extras.features[key])
        own = {**self._fields[index], "index": index}
        return Prompt(**own, label=label, images=extras.get(self.image_key))

    def contents(self) -> Iterator[bytes]:
        """Yield all prompts and labels as bytes for hashing."""
        yield from super().contents()
        if self.data.label_key:
            yield from contents_of(self._extras.select_columns([self.data.label_key]))

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return a prompt's text, tokens and data source.

        `rewritten` is true if assistant turns were removed from the end of the prompt.
        """
        [prompt] = passages
        [known] = encoded
        if not known.tokens:
            raise row_error(row, self.data.input_key, "is an empty prompt.")
        source = str(row.get(DATASOURCE) or "default")
        return {
            "text": prompt.text,
            "tokens": known.tokens,
            "datasource": source,
            "rewritten": prompt.rewritten,
        }

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Return the prompt."""
        if not self.data.apply_chat_template:
            text = fill_template(self.data.input_template, text_of(row, self.data.input_key))
            return [Passage(text=text)]
        messages = messages_of(row, self.data.input_key, role="user", flag="--data.input_key")
        asked = list(messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            problem = "has only assistant turns. A prompt needs a user turn."
            raise row_error(row, self.data.input_key, problem)
        tools = tools_of(row)
        try:
            text = render(self.tokenizer, asked, add_generation_prompt=True, tools=tools)
            lost = lost_tools(self.tokenizer, asked, tools).first
        except ValueError as error:
            raise row_error(row, self.data.input_key, f"{error}.") from error
        answered = len(asked) < len(messages)
        return [Passage(text=text, rewritten=answered, lost=lost)]


@dataclass(frozen=True, kw_only=True)
class Answered(Prompt):
    """A prompt whose label is the answer to score. `tokens` contains both."""

    label: str = ""


class AnsweredDataset(SFTDataset):
    """A dataset's prompts and answers, which a reward model scores as one text.

    See `SFTDataset` for how texts end, how they are truncated, which rows are dropped, and which
    part of a chat is the answer. A chat's answer is the rendered text.
    """

    row: ClassVar = Answered

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return the prompt, the answer and the tokens of both, or the reason for dropping the
        row."""
        [passage] = passages
        [known] = encoded
        data = self.data
        if known.tokens_of((passage.response, len(passage.text))).start >= data.max_len - 1:
            return f"whose prompt leaves no room for the answer (--data.max_len {data.max_len})"
        prompt = passage.text[: passage.response]
        answer = passage.text[passage.response :]
        # the row's own texts, without the end-of-text token that was added
        if not data.apply_chat_template:
            prompt = fill_template(data.input_template, row[data.input_key])
            answer = row[data.output_key]
        tokens = cut(known.tokens, data.max_len, self.tokenizer, self.ends.ids)
        return {
            "text": prompt,
            "label": answer,
            "tokens": tokens,
            "cut": len(known.tokens) > data.max_len,
        }
