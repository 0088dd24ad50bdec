"""Rows of KTO: answers to prompts, each desirable or not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.utils.data
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import KTODataConfig
from openrlhf.data.errors import row_error
from openrlhf.data.feedback import PreferenceDataset
from openrlhf.data.rows import Result
from openrlhf.data.sft import SFTDataset, SFTRow
from openrlhf.data.templates import Encoded, Passage


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

    Raises DataError for a missing column, for a malformed row or label (naming the row), and if no row is left.
    """

    row: ClassVar = LabelledRow
    keys: ClassVar = ("input_key", "output_key", "label_key")

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
        self.pairs, self.summary = pairs, f"{pairs.summary} Both answers of a pair are rows of their own."

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> LabelledRow:
        pair, rejected = divmod(index, 2)
        row = self.pairs[pair]
        tokens, prompt = row.rejected if rejected else row.chosen, max(1, row.prompt_length)
        mask = [False] * prompt + [True] * (len(tokens) - prompt)
        return LabelledRow(tokens=tokens, loss_mask=mask, desirable=not rejected)
