"""Flat batches: rows can be taken apart, reordered and joined, and nothing changes but their place."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.core.batches import Experience, Layout, TokenRows, offsets_of
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
TOKEN_COLUMNS = ("tokens", "action_mask", "rollout_logprobs", "advantages", "old_logprobs")
SAMPLE_COLUMNS = ("group_ids", "rewards", "truncated")


def batch_of(lengths: list[int]) -> Experience:
    """A batch in which every entry of every column is different, where its type allows."""
    tokens, samples = sum(lengths), len(lengths)
    number = torch.arange(tokens)
    return Experience(
        tokens=number,
        offsets=offsets_of(lengths),
        action_mask=number % 3 == 0,
        rollout_logprobs=-number.float(),
        group_ids=torch.arange(samples) // 2,
        rewards=torch.arange(samples) + 0.5,
        truncated=torch.arange(samples) % 2 == 0,
        advantages=number + 1000.0,
        old_logprobs=number - 1000.0,
    )


def rows_of(batch: Experience) -> list[tuple[Any, ...]]:
    """Each row as plain lists and numbers."""
    edges = batch.offsets.tolist()
    return [
        (
            *(getattr(batch, name)[start:end].tolist() for name in TOKEN_COLUMNS),
            *(getattr(batch, name)[row].item() for name in SAMPLE_COLUMNS),
        )
        for row, (start, end) in enumerate(itertools.pairwise(edges))
    ]


# ---- rows


def test_offsets_are_where_rows_start_and_the_last_one_ends() -> None:
    assert offsets_of([2, 3]).tolist() == [0, 2, 5]
    assert offsets_of([]).tolist() == [0]


@given(LENGTHS, st.data())
def test_selected_rows_are_the_rows_in_the_order_asked_for(lengths: list[int], data: Any) -> None:
    batch = batch_of(lengths)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    rows = rows_of(batch)
    assert rows_of(batch.select(wanted)) == [rows[i] for i in wanted]


@given(LENGTHS, st.data())
def test_splitting_is_selecting_each_part(lengths: list[int], data: Any) -> None:
    batch = batch_of(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = batch.split([order[:cut], order[cut:]])
    assert [part.num_samples for part in parts] == [cut, len(lengths) - cut]
    rows = rows_of(batch)
    assert [row for part in parts for row in rows_of(part)] == [rows[i] for i in order]


def test_columns_that_were_not_computed_stay_absent() -> None:
    batch = batch_of([2, 3])
    assert batch.values is None
    assert batch.select([0]).to("cpu").values is None


def test_a_batch_without_rows_is_a_batch() -> None:
    empty = batch_of([2, 3]).select([])
    assert (empty.num_samples, empty.num_tokens) == (0, 0)
    assert Experience.from_trajectories([]).num_samples == 0
    assert list(empty.blocks()) == []


def test_selecting_leaves_the_original_alone() -> None:
    batch = batch_of([2, 3])
    part = batch.select([1])
    part.tokens.zero_()
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4]


def test_replaced_columns_leave_the_others_as_they_are() -> None:
    batch = batch_of([2, 1])
    changed = replace(batch, rewards=torch.tensor([7.0, 8.0]), values=torch.zeros(3))
    assert changed.rewards.tolist() == [7.0, 8.0]
    assert changed.values is not None and batch.values is None
    assert torch.equal(changed.tokens, batch.tokens)


def test_each_token_knows_its_row() -> None:
    assert batch_of([2, 0, 3]).sample_of_token().tolist() == [0, 0, 2, 2, 2]


def test_actions_are_counted_per_row() -> None:
    batch = batch_of([2, 0, 3])  # tokens 0 and 3 are actions
    assert batch.num_actions.tolist() == [1, 0, 1]


# ---- wrong lengths


@pytest.mark.parametrize(
    ("column", "entries"), [("tokens", 4), ("advantages", 6), ("rewards", 3), ("group_ids", 1)]
)
def test_a_column_of_another_length_is_refused_by_name(column: str, entries: int) -> None:
    with pytest.raises(
        ValueError, match=rf"Experience\.{column} has {entries} entries.* 2 sequences with 5 tokens"
    ):
        replace(batch_of([2, 3]), **{column: torch.zeros(entries)})


def test_supervised_rows_are_checked_too() -> None:
    with pytest.raises(ValueError, match="more tokens than mask entries, or fewer"):
        TokenRows.from_lists([[1, 2, 3]], [[True, False]])


# ---- padded blocks


def test_a_layout_pads_on_the_right() -> None:
    layout = Layout.of(offsets_of([2, 3, 1]))
    block = layout.gather(torch.tensor([1, 2, 3, 4, 5, 6]))
    assert block.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    assert layout.real.tolist() == [[True, True, False], [True] * 3, [True, False, False]]


def test_padding_of_a_mask_is_false_though_the_first_token_is_true() -> None:
    block = Layout.of(offsets_of([1, 2])).gather(torch.tensor([True, True, True]))
    assert block.tolist() == [[True, False], [True, True]]


def test_padding_of_numbers_is_zero_though_the_first_token_is_not_finite() -> None:
    block = Layout.of(offsets_of([1, 2])).gather(torch.tensor([float("nan"), 1.0, 2.0]))
    assert block[0, 1] == 0


@given(LENGTHS, st.data())
def test_scattering_what_was_gathered_restores_those_rows_and_no_others(
    lengths: list[int], data: Any
) -> None:
    batch = batch_of(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1))
    layout = Layout.of(batch.offsets, torch.tensor(rows))
    column = torch.full((batch.num_tokens,), -1.0)
    layout.scatter(layout.gather(batch.rollout_logprobs), column)
    chosen = torch.isin(batch.sample_of_token(), torch.tensor(rows))
    assert torch.equal(column[chosen], batch.rollout_logprobs[chosen])
    assert (column[~chosen] == -1).all()


def test_gradients_flow_through_a_block_to_the_real_tokens_only() -> None:
    column = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    block = Layout.of(offsets_of([1, 2])).gather(column)
    (block * torch.tensor([[10.0, 100.0], [20.0, 30.0]])).sum().backward()
    assert column.grad is not None
    assert column.grad.tolist() == [10.0, 20.0, 30.0]


@given(LENGTHS, st.integers(1, 40))
def test_blocks_hold_every_token_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batch = batch_of(lengths)
    blocks = list(batch.blocks(budget))
    seen = torch.cat([block.positions[block.real] for block in blocks])
    assert sorted(seen.tolist()) == list(range(batch.num_tokens))
    assert sum(len(block.positions) for block in blocks) == batch.num_samples
    for block in blocks:
        assert block.positions.numel() <= budget or len(block.positions) == 1


@given(LENGTHS, st.integers(1, 40))
def test_no_block_is_longer_than_the_shortest_row_of_an_earlier_one(
    lengths: list[int], budget: int
) -> None:
    widths = [block.real.sum(1) for block in batch_of(lengths).blocks(budget)]
    for longer, shorter in itertools.pairwise(widths):
        assert int(longer.min()) >= int(shorter.max())


@given(LENGTHS, st.integers(1, 60), st.none() | st.integers(1, 10), st.booleans())
def test_parts_of_similar_rows_have_every_row_and_none_of_several_is_over_a_limit(
    lengths: list[int], budget: int, most: int | None, padded: bool
) -> None:
    parts = [
        rows.tolist()
        for rows in batch_of(lengths).similar_rows(budget, max_rows=most, padded=padded)
    ]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) <= (most or len(part))
        inside = [lengths[row] for row in part]
        assert len(part) == 1 or (max(inside) * len(part) if padded else sum(inside)) <= budget


def test_padding_counts_and_short_rows_go_with_short_ones() -> None:
    batch = batch_of([2, 10, 2, 9, 2, 2])
    assert [sorted(rows.tolist()) for rows in batch.similar_rows(20)] == [[1, 3], [0, 2, 4, 5]]
    assert [sorted(rows.tolist()) for rows in batch.similar_rows(27, padded=False)] == [
        [0, 1, 2, 3, 4, 5]
    ]
    parts = [rows.tolist() for rows in batch.similar_rows(99, max_rows=3, padded=False)]
    assert [len(part) for part in parts] == [3, 3] and {1, 3} < set(parts[0])


# ---- from episodes


def episode(index: int, sample: int, reward: float | None, stop: StopReason) -> Trajectory:
    length = 2 + index + sample
    return Trajectory(
        tokens=list(range(length)),
        action_mask=[False] + [True] * (length - 1),
        rollout_logprobs=[0.0] + [-0.5] * (length - 1),
        prompt=Prompt(index=index, text="", tokens=[0]),
        sample_index=sample,
        stop_reason=stop,
        reward=reward,
    )


def test_episodes_become_rows_in_their_order() -> None:
    batch = Experience.from_trajectories(
        [
            episode(4, 0, 1.0, StopReason.STOP),
            episode(4, 1, 0.0, StopReason.LENGTH),
            episode(2, 0, 0.25, StopReason.STOP),
        ]
    )
    assert batch.lengths.tolist() == [6, 7, 4]
    assert batch.group_ids.tolist() == [4, 4, 2]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.25]
    assert batch.truncated.tolist() == [False, True, False]
    assert batch.num_actions.tolist() == [5, 6, 3]
    assert batch.rollout_logprobs.dtype == torch.float32


def test_conversations_of_an_episode_are_rows_with_its_reward() -> None:
    plain = episode(4, 1, 0.0, StopReason.STOP)
    several = replace(
        episode(4, 0, 1.0, StopReason.LENGTH), earlier=(episode(2, 0, None, StopReason.STOP), plain)
    )
    batch = Experience.from_trajectories([several, plain])
    assert batch.lengths.tolist() == [4, 7, 6, 7]
    assert batch.group_ids.tolist() == [4, 4, 4, 4]
    assert batch.rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert batch.truncated.tolist() == [True, True, True, False]
    assert batch.episode_of_row.tolist() == [0, 0, 0, 1]
    assert batch.last_rows.tolist() == [2, 3]
    assert batch.rows_of([1]).tolist() == [3]
    assert batch.select(batch.rows_of([0])).last_rows.tolist() == [2]
    assert several.num_actions == int(batch.num_actions[:3].sum())
    assert (
        Experience.from_trajectories([several.packed(), plain.packed()]).tokens.tolist()
        == batch.tokens.tolist()
    )


def test_a_reward_that_is_still_to_come_is_not_a_number() -> None:
    batch = Experience.from_trajectories([episode(0, 0, None, StopReason.STOP)])
    assert batch.rewards.isnan().tolist() == [True]


def test_a_row_whose_mask_has_another_length_is_refused_even_if_the_totals_agree() -> None:
    with pytest.raises(ValueError, match="more tokens than mask entries, or fewer"):
        TokenRows.from_lists([[1, 2, 3], [4, 5]], [[False, True], [False, True, True]])


def test_packed_episodes_make_the_same_batch() -> None:
    """What waits for a step waits in arrays: no number changes, although 32 bits hold it."""
    episodes = [episode(index, 0, 1.0, StopReason.STOP) for index in (0, 1)]
    lists = [replace(t, columns={"values": [0.125] * len(t.tokens)}) for t in episodes]
    expected, batch = (
        Experience.from_trajectories(each) for each in (lists, [t.packed() for t in lists])
    )
    for column in fields(Experience):
        a, b = getattr(expected, column.name), getattr(batch, column.name)
        assert (a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)), column.name
