"""Rows of reinforcement learning: a rendered prompt, and the data that the reward needs."""

from collections.abc import Mapping
from typing import Any

import torch.utils.data
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.config.evaluation import EvaluatedDataConfig
from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.data.errors import ROW, check_columns, row_error, text_of
from openrlhf.data.rows import Columns, as_rows, map_rows, number_rows
from openrlhf.data.templates import encode, fill_template, messages_of, render
from openrlhf.data.tokenizer import require_chat_template
from openrlhf.trajectory import Prompt

FEATURES = Features({"text": Value("string"), "tokens": List(Value("int32"))})
PromptSection = RLDataConfig | EvaluatedDataConfig | InferenceDataConfig  # columns and templates of prompts
DATASOURCE = "datasource"


class PromptDataset(torch.utils.data.Dataset[Prompt]):
    """The rows of a dataset as prompts, rendered when the object is created; no row is dropped.

    With `apply_chat_template` the input column holds strings (a user message) or lists of messages. They are rendered
    with the generation prompt of the assistant. Without `apply_chat_template` the column holds strings, which are put
    into `input_template`. Without `label_key` every label is "". Without a column `datasource` the data source is
    "default". Without a column `image_key` there are no images. The index of a prompt is its row number: a source
    replaces the index by the running number of the draw. Raises DataError for a missing column, and for a malformed or
    empty prompt, naming the row.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: PromptSection, *, image_key: str = "images"
    ) -> None:
        label_flag = "--data.output_key" if isinstance(data, InferenceDataConfig) else "--data.label_key"
        columns = {"--data.input_key": data.input_key, label_flag: data.label_key}
        check_columns(dataset.column_names, columns)
        if data.apply_chat_template:
            require_chat_template(tokenizer)
        self.tokenizer, self.data, self.image_key = tokenizer, data, image_key
        rows = number_rows(dataset)
        self._prompts = map_rows(rows, [data.input_key], self._rendered, FEATURES, "Rendering prompts")
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
        """Batches of the input column as the columns of `FEATURES`."""
        rows = as_rows(columns)
        prompts = encode(self.tokenizer, [self._text(row) for row in rows])
        for row, prompt in zip(rows, prompts, strict=True):
            if not prompt.tokens:
                raise row_error(row, self.data.input_key, "is an empty prompt.")
        texts, tokens = [prompt.text for prompt in prompts], [prompt.tokens for prompt in prompts]
        return {"text": texts, "tokens": tokens}

    def _text(self, row: Mapping[str, Any]) -> str:
        if not self.data.apply_chat_template:
            return fill_template(self.data.input_template, text_of(row, self.data.input_key))
        messages = messages_of(row, self.data.input_key, role="user", flag="--data.input_key")
        try:
            return render(self.tokenizer, messages, add_generation_prompt=True)
        except ValueError as error:
            raise row_error(row, self.data.input_key, f"{error}.") from error
