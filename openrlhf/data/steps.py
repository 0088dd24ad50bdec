"""Rows of process reward models: texts with a placeholder after each step, and a label of each
step.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import PRMConfig
from openrlhf.data.errors import DataError, check_columns, kind, row_error, text_of
from openrlhf.data.rows import Result, TokenizedRows
from openrlhf.data.templates import Encoded, Passage


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A text; the places of the placeholders of labelled steps; and their labels: tokens, or
    probabilities of a right step.
    """

    tokens: list[int]
    places: list[int]
    labels: list[float]


class StepDataset(TokenizedRows[StepRow]):
    """The rows of a dataset as tokens, cut to `max_len`, with the labels of the steps that are
    left.

    A label is a text of one token (hard), or a number from 0 to 1 (soft); null leaves a step
    without a label. `soft`: whether the labels are numbers. Raises DataError for malformed rows,
    naming the first, and if no row is left.
    """

    row: ClassVar = StepRow
    keys = ("input_key", "label_key")

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: PRMConfig
    ) -> None:
        self.prm, data = config.prm, config.data
        check_columns(
            dataset, {"--data.input_key": data.input_key, "--data.label_key": data.label_key}
        )
        self.placeholder = one_token(
            tokenizer, self.prm.placeholder_token or "", "--prm.placeholder_token"
        )
        self.reward_tokens = [
            one_token(tokenizer, token, "--prm.reward_tokens") for token in self.prm.reward_tokens
        ]
        lists = (labels for labels in dataset[data.label_key] if isinstance(labels, list))
        first = next((label for labels in lists for label in labels if label is not None), None)
        self.soft = isinstance(first, int | float)
        if self.soft and len(self.reward_tokens) != 2:
            raise DataError(
                f"Labels of --data.label_key {data.label_key} are numbers, the probabilities of a right step: name the "
                f"tokens of a right and of a wrong step with --prm.reward_tokens, not {list(self.prm.reward_tokens)}."
            )
        super().__init__(dataset, tokenizer, data)
        if not self.soft:
            found = Counter(
                int(label) for labels in self.rows["labels"][:] for label in labels
            ).most_common()
            self.summary += f" Labels: {', '.join(f'{count} {tokenizer.decode([label])}' for label, count in found)}."

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """The text."""
        return [Passage(text=text_of(row, self.data.input_key), spans=[], response=0)]

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """The columns of a row, or the reason why it is dropped."""
        data, every, labels = self.data, encoded[0].tokens, row[self.data.label_key]
        if not isinstance(labels, list):
            raise row_error(
                row, data.label_key, f"is {kind(labels)}, not a list with a label for each step."
            )
        places = [place for place, token in enumerate(every) if token == self.placeholder]
        if len(labels) != len(places):
            shown = repr(self.prm.placeholder_token)
            raise row_error(
                row,
                data.label_key,
                f"has {len(labels)} labels for {len(places)} placeholders {shown}.",
            )
        tokens = every[: data.max_len]
        kept = [
            (place, self._label(row, label))
            for place, label in zip(places, labels, strict=True)
            if place < len(tokens) and label is not None
        ]
        if not kept:
            return (
                "without a labelled step"
                if not any(label is not None for label in labels)
                else "cut before a step"
            )
        where, known = zip(*kept, strict=True)
        return {"tokens": tokens, "places": where, "labels": known, "cut": len(every) > len(tokens)}

    def _label(self, row: Mapping[str, Any], label: Any) -> float:
        column = self.data.label_key
        if self.soft:
            if not isinstance(label, int | float) or not 0 <= label <= 1:
                raise row_error(row, column, f"has the label {label!r}, which is no probability.")
            return float(label)
        tokens = (
            self.tokenizer.encode(label, add_special_tokens=False) if isinstance(label, str) else []
        )
        if len(tokens) != 1 or (self.reward_tokens and tokens[0] not in self.reward_tokens):
            expected = (
                f"one of {list(self.prm.reward_tokens)}"
                if self.reward_tokens
                else "a text of one token"
            )
            raise row_error(row, column, f"has the label {label!r}, not {expected}.")
        return float(tokens[0])


def one_token(tokenizer: PreTrainedTokenizerBase, text: str, flag: str) -> int:
    """The token that a text is. Raises DataError for a text that is more, or less, than one token."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1:
        raise DataError(
            f"{flag} {text!r} is {len(tokens)} tokens of this tokenizer, not one: choose another text."
        )
    return tokens[0]
