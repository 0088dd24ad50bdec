"""Rows for reinforcement learning: a rendered prompt and the data that the reward needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.errors import ROW, SOURCE, row_error, text_of
from openrlhf.data.layouts import DATASOURCE
from openrlhf.data.lost_tools import lost_tool
from openrlhf.data.messages import messages_of, tools_of
from openrlhf.data.rows import Result, TokenizedRows, contents_of, number_rows
from openrlhf.data.sft import SFTDataset
from openrlhf.data.templates import Encoded, Passage, cut, fill_template, render
from openrlhf.data.text_files import without_added_nulls
from openrlhf.reporting import notice

# Sections with the columns and the templates of prompts.
PromptSection = RLDataConfig | EvaluatedDataConfig | InferenceDataConfig


class PromptDataset(TokenizedRows[Prompt]):
    """The rows of a dataset as prompts, rendered when the object is created; no row is dropped.

    With `apply_chat_template` the input column contains strings (a user message) or lists of
    messages. They are rendered up to the last turn that is not the assistant's, with the tools of
    the column `tools` and the assistant's generation prompt. Without `apply_chat_template` the
    column contains strings, which are put into `input_template`. Without `label_key` every label is
    "". Without a column `datasource` the data source is "default". Without a column `image_key`
    there are no images. The index of a prompt is its row number; a source replaces the index with
    the running number of the draw. Raises DataError for a missing column, and for malformed or
    empty prompts, naming the first.
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
                f"{answered} prompts end with turns of the assistant, which are left out: "
                "the policy answers instead."
            )
        extras = (data.label_key, image_key, SOURCE, ROW)
        self._extras = rows.select_columns([name for name in rows.column_names if name in extras])

    def lengths(self) -> list[int]:
        """Return the number of tokens of each prompt."""
        found: list[int] = []
        batches: Any = self._fields.select_columns(["tokens"]).with_format("arrow").iter(1000)
        for batch in batches:
            found += batch.column("tokens").combine_chunks().value_lengths().to_pylist()
        return found

    def labels(self) -> list[Any]:
        """Return the label of each prompt, or an empty list without a label column."""
        if not self.data.label_key:
            return []
        return list(self._extras[self.data.label_key])

    def origin(self, index: int) -> str:
        """Return the dataset and the row number of a prompt."""
        row = self._extras[index]
        return f"{row[SOURCE]}, row {row[ROW]}"

    def __getitem__(self, index: int) -> Prompt:
        extras = self._extras[index]
        key = self.data.label_key
        label: Any = ""
        if key:
            label = without_added_nulls(extras[key], self._extras.features[key])
        own = {**self._fields[index], "index": index}
        return Prompt(**own, label=label, images=extras.get(self.image_key))

    def contents(self) -> Iterator[bytes]:
        """Yield all prompts and labels as bytes, for hashing."""
        yield from super().contents()
        if self.data.label_key:
            yield from contents_of(self._extras.select_columns([self.data.label_key]))

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return text, tokens and data source of a prompt.

        `rewritten` is true if assistant turns at the end of the prompt were left out.
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
            return [Passage(text=text, spans=[], response=0)]
        messages = messages_of(row, self.data.input_key, role="user", flag="--data.input_key")
        asked = list(messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            problem = "has only turns of the assistant. A prompt needs a user's turn."
            raise row_error(row, self.data.input_key, problem)
        tools = tools_of(row)
        try:
            text = render(self.tokenizer, asked, add_generation_prompt=True, tools=tools)
            lost = lost_tool(self.tokenizer, asked, text, tools=tools, add_generation_prompt=True)
        except ValueError as error:
            raise row_error(row, self.data.input_key, f"{error}.") from error
        answered = len(asked) < len(messages)
        return [Passage(text=text, spans=[], response=0, rewritten=answered, lost=lost)]


@dataclass(frozen=True, kw_only=True)
class Answered(Prompt):
    """A prompt with the answer to score, which is the label. `tokens` contains both."""

    label: str = ""


class AnsweredDataset(SFTDataset):
    """The rows of a dataset as prompts and answers, which a reward model scores as one text.

    `SFTDataset` documents how a text ends, how it is cut, which rows are dropped, and which part of
    a chat is the answer. The answer of a chat is the text that the template renders.
    """

    row: ClassVar = Answered

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return prompt, answer and the tokens of both, or the reason why the row is dropped."""
        [passage] = passages
        [known] = encoded
        data = self.data
        if known.tokens_of((passage.response, len(passage.text))).start >= data.max_len - 1:
            return f"whose prompt leaves no token of the answer (--data.max_len {data.max_len})"
        prompt = passage.text[: passage.response]
        answer = passage.text[passage.response :]
        if not data.apply_chat_template:  # the texts of the row, without the added end-of-text
            prompt = fill_template(data.input_template, row[data.input_key])
            answer = row[data.output_key]
        tokens = cut(known.tokens, data.max_len, self.tokenizer, self.ends.ids)
        return {
            "text": prompt,
            "label": answer,
            "tokens": tokens,
            "cut": len(known.tokens) > data.max_len,
        }
