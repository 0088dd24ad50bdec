"""Rows of KTO: answers to prompts, each desirable or not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import KTODataConfig
from openrlhf.data import sft
from openrlhf.data.errors import row_error
from openrlhf.data.feedback import PreferenceDataset
from openrlhf.data.layouts import columns_read
from openrlhf.data.rows import Columns, TokenizedRows, as_rows

FEATURES = Features({**sft.FEATURES, "desirable": Value("bool")})


@dataclass(frozen=True, kw_only=True)
class LabelledRow:
    """A prompt and an answer, as tokens; the answer begins at the first target, and ends with end-of-text."""

    tokens: list[int]
    loss_mask: list[bool]
    desirable: bool
    other: list[int] | None = None  # the answer of another row, for KTO's KL

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.loss_mask.index(True)


class LabelledDataset(TokenizedRows[LabelledRow]):
    """The rows of a dataset as tokens with labels. Texts are those of `SFTDataset`: the answer is the response.

    Raises DataError for a missing column, for a malformed row or label (naming the row), and if no row is left.
    """

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data: KTODataConfig) -> None:
        self.answers, self.label_key = sft.Encoder(tokenizer=tokenizer, data=data, pretrain=False), data.label_key
        used = columns_read(dataset, tokenizer, data, ("input_key", "output_key", "label_key"))
        advice = "Look at --data.*_key and --data.max_len."
        super().__init__(
            LabelledRow, dataset, used, self._encoded, FEATURES, what="row", advice=advice, max_len=data.max_len
        )
        desirable = sum(self.rows["desirable"])
        self.summary += f" {desirable} are desirable, {len(self) - desirable} are not."

    def _encoded(self, columns: Columns) -> Columns:
        """Batches of columns as the columns of `FEATURES`."""
        return {**self.answers(columns), "desirable": [_label(row, self.label_key) for row in as_rows(columns)]}


def _label(row: Mapping[str, Any], column: str) -> bool:
    value = row[column]
    if str(value).lower() not in ("1", "0", "true", "false", "1.0", "0.0"):
        raise row_error(row, column, f"is {value!r}, which is no label: 1 or true (desirable), 0 or false.")
    return str(value).lower() in ("1", "true", "1.0")


class BothAnswers(torch.utils.data.Dataset[LabelledRow]):
    """Pairs as labelled rows: the chosen answer is desirable, the rejected one is not."""

    def __init__(self, pairs: PreferenceDataset) -> None:
        self.pairs, self.summary = pairs, f"{pairs.summary} Both answers of a pair are rows of their own."

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> LabelledRow:
        pair, rejected = divmod(index, 2)
        row = self.pairs[pair]
        tokens, prompt = row.rejected if rejected else row.chosen, max(1, row.prompt_length)
        mask = [False] * prompt + [True] * (len(tokens) - prompt)
        return LabelledRow(tokens=tokens, loss_mask=mask, desirable=not rejected)
