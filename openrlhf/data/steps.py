"""Rows for process reward models: texts with a placeholder and a label after each step."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import PRMConfig
from openrlhf.data.errors import DataError, check_columns, kind, row_error, text_of
from openrlhf.data.rows import Result, TokenizedRows
from openrlhf.data.templates import Encoded, Passage


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A tokenized text with the placeholder positions and labels of its labelled steps.

    A label is a token id, or the probability that the step is correct.
    """

    tokens: list[int]
    places: list[int]
    labels: list[float]


class StepDataset(TokenizedRows[StepRow]):
    """A dataset's rows as tokens, truncated to `max_len`, with the labels of the remaining steps.

    A label is a single-token text (hard) or a number from 0 to 1 (soft); null leaves a step
    unlabelled. `soft` is true if the labels are numbers. Raises DataError if rows are malformed
    (the message names the first rows) or if all rows are dropped.
    """

    row: ClassVar = StepRow
    keys = ("input_key", "label_key")

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: PRMConfig
    ) -> None:
        self.prm = config.prm
        data = config.data
        check_columns(
            dataset, {"--data.input_key": data.input_key, "--data.label_key": data.label_key}
        )
        self.placeholder = one_token(
            tokenizer, self.prm.placeholder_token, "--prm.placeholder_token"
        )
        self.reward_tokens = [
            one_token(tokenizer, token, "--prm.reward_tokens") for token in self.prm.reward_tokens
        ]
        self.soft = isinstance(_first_label(dataset[data.label_key]), int | float)
        if self.soft and len(self.reward_tokens) != 2:
            raise DataError(
                f"The labels in --data.label_key {data.label_key} are numbers (probabilities that "
                "a step is correct). Set --prm.reward_tokens to two tokens, one for a correct and "
                f"one for a wrong step, not {list(self.prm.reward_tokens)}."
            )
        super().__init__(dataset, tokenizer, data)
        if not self.soft:
            counts = Counter(chain.from_iterable(self.rows["labels"][:]))
            shown = [f"{n} {tokenizer.decode([int(label)])}" for label, n in counts.most_common()]
            self.summary += f" Labels: {', '.join(shown)}."

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Return the text of a row with its placeholders."""
        return [Passage(text=text_of(row, self.data.input_key))]

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return the columns of a row, or the reason for dropping it."""
        data = self.data
        uncut = encoded[0].tokens
        labels = row[data.label_key]
        if not isinstance(labels, list):
            raise row_error(
                row, data.label_key, f"is {kind(labels)}, not a list with a label for each step."
            )
        places = [place for place, token in enumerate(uncut) if token == self.placeholder]
        if len(labels) != len(places):
            problem = f"has {len(labels)} labels for {len(places)} placeholders"
            raise row_error(row, data.label_key, f"{problem} {self.prm.placeholder_token!r}.")
        tokens = uncut[: data.max_len]
        kept: dict[int, float] = {}
        for place, label in zip(places, labels, strict=True):
            if place < len(tokens) and label is not None:
                kept[place] = self._label(row, label)
        if not kept:
            return "without a labelled step within --data.max_len tokens"
        return {
            "tokens": tokens,
            "places": list(kept),
            "labels": list(kept.values()),
            "cut": len(uncut) > len(tokens),
        }

    def _label(self, row: Mapping[str, Any], label: Any) -> float:
        """Return a label as a probability or a token id. Raises DataError for an invalid label."""
        if self.soft:
            expected = "a number from 0 to 1"
            if isinstance(label, int | float) and 0 <= label <= 1:
                return float(label)
        else:
            expected = f"one of {list(self.prm.reward_tokens) or 'the single tokens'}"
            if isinstance(label, str):
                tokens = self.tokenizer.encode(label, add_special_tokens=False)
                if len(tokens) == 1 and tokens[0] in (self.reward_tokens or tokens):
                    return float(tokens[0])
        raise row_error(row, self.data.label_key, f"has the label {label!r}, not {expected}.")


def _first_label(column: Iterable[Any]) -> Any:
    """Return the first label in a column of lists that is not null, or None."""
    lists = (labels for labels in column if isinstance(labels, list))
    return next((label for label in chain.from_iterable(lists) if label is not None), None)


def one_token(tokenizer: PreTrainedTokenizerBase, text: str, flag: str) -> int:
    """Return the id of a single-token text. Raises DataError for any other text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1:
        raise DataError(
            f"{flag} {text!r} is encoded as {len(tokens)} tokens by this tokenizer, not one. "
            "Choose another text."
        )
    return tokens[0]
