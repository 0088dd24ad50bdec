"""Tests for selecting the pretraining text of each optimizer step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from openrlhf.data.sft import SFTRow
from openrlhf.trainers.pretraining_mix import PretrainingMix

ROWS = [
    SFTRow(tokens=[row] * (2 + row % 3), loss_mask=[False, *[True] * (1 + row % 3)])
    for row in range(7)
]


def mix(batch_size: int = 3) -> PretrainingMix:
    rows: Any = ROWS  # a list suffices, because only the length and the rows are used
    return PretrainingMix(rows, batch_size=batch_size, seed=1)


def test_every_row_is_drawn_once_per_epoch() -> None:
    drawn = [row for step in range(7) for row in mix().draw(step)]  # three epochs of 7 rows
    for start in range(0, 21, 7):
        assert sorted(drawn[start : start + 7]) == list(range(7))
    assert drawn[:7] != drawn[7:14]


def test_batch_larger_than_the_dataset_draws_from_several_epochs() -> None:
    assert Counter(mix(batch_size=16).draw(0)).most_common()[-1][1] == 2
    assert len(mix(batch_size=16).draw(5)) == 16


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
def test_each_row_of_a_step_is_in_exactly_one_slice(slices: int) -> None:
    steps = [4, 5]
    per_slice = mix().for_slices(steps, slices)
    assert len(per_slice) == slices
    for place, step in enumerate(steps):
        counted = [text for texts in per_slice for text in [texts[place]] if text.loss_mask.any()]
        rows = [int(row) for text in counted for row in text.tokens[text.offsets[:-1]]]
        assert sorted(rows) == sorted(mix().draw(step))
        assert all(text.num_rows for texts in per_slice for text in [texts[place]]), (
            "a forward pass needs at least one row"
        )
