"""Rows of reinforcement learning: a rendered prompt, and the data that the reward needs."""

from collections.abc import Mapping
from typing import Any

import torch.utils.data
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.data.errors import ROW, notice, row_error, text_of
from openrlhf.data.layouts import DATASOURCE, columns_read, read
from openrlhf.data.rows import Columns, as_rows, map_rows, number_rows
from openrlhf.data.templates import encode, fill_template, messages_of, render, tools_of
from openrlhf.trajectory import Prompt

FEATURES = Features({"text": Value("string"), "tokens": List(Value("int32")), "answered": Value("bool")})
PromptSection = RLDataConfig | EvaluatedDataConfig  # columns and templates of prompts


class PromptDataset(torch.utils.data.Dataset[Prompt]):
    """The rows of a dataset as prompts, rendered when the object is created; no row is dropped.

    With `apply_chat_template` the input column holds strings (a user message) or lists of messages. They are rendered
    up to the last turn that is not the assistant's, with the tools in the column `tools`, and with the generation
    prompt of the assistant. Without `apply_chat_template` the column holds strings, which are put
    into `input_template`. Without `label_key` every label is "". Without a column `datasource` the data source is
    "default". Without a column `image_key` there are no images. The index of a prompt is its row number: a source
    replaces the index by the running number of the draw. Raises DataError for a missing column, and for a malformed or
    empty prompt, naming the row.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: PromptSection, *, image_key: str = "images"
    ) -> None:
        used = columns_read(dataset, tokenizer, data, ("input_key", "label_key"))
        self.tokenizer, self.data, self.image_key = tokenizer, data, image_key
        rows = number_rows(dataset)
        prompts = map_rows(rows, used, self._rendered, FEATURES, "Rendering prompts")
        if answered := sum(prompts["answered"]):
            notice(
                f"{answered} prompts end with turns of the assistant, which are left out: the policy answers instead."
            )
        self._prompts = prompts.remove_columns("answered")
        wanted = (data.label_key, DATASOURCE, image_key, ROW)
        self._extras = rows.select_columns([name for name in rows.column_names if name in wanted])

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        extras = self._extras[index]
        return Prompt(
            index=index,
            **self._prompts[index],
            label=extras[self.data.label_key] if self.data.label_key else "",
            datasource=str(extras.get(DATASOURCE) or "default"),
            images=extras.get(self.image_key),
        )

    def _rendered(self, columns: Columns) -> Columns:
        """Batches of columns as the columns of `FEATURES`."""
        rows = [read(row, self.data.layout) for row in as_rows(columns)]
        texts, answered = zip(*map(self._text, rows), strict=True)
        prompts = encode(self.tokenizer, texts)
        for row, prompt in zip(rows, prompts, strict=True):
            if not prompt.tokens:
                raise row_error(row, self.data.input_key, "is an empty prompt.")
        return {"text": list(texts), "tokens": [prompt.tokens for prompt in prompts], "answered": list(answered)}

    def _text(self, row: Mapping[str, Any]) -> tuple[str, bool]:
        """The prompt, and whether turns of the assistant at its end were left out."""
        if not self.data.apply_chat_template:
            return fill_template(self.data.input_template, text_of(row, self.data.input_key)), False
        messages = messages_of(row, self.data.input_key, role="user", flag="--data.input_key")
        asked = max((n for n, message in enumerate(messages, 1) if message["role"] != "assistant"), default=0)
        if not asked:
            raise row_error(row, self.data.input_key, "has turns of the assistant only, which nobody asked for.")
        tools = tools_of(row)
        try:
            text = render(self.tokenizer, messages[:asked], add_generation_prompt=True, tools=tools)
        except ValueError as error:
            raise row_error(row, self.data.input_key, f"{error}.") from error
        return text, asked < len(messages)
