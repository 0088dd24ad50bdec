"""Flat batches: selecting rows, padding them into blocks, and building batches from episodes."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.core.batches import (
    Experience,
    Items,
    Layout,
    Ragged,
    TokenRows,
    offsets_of,
    per_row,
    per_sample,
    per_token,
)
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory
from tests.second_device import DEVICE, SecondDevice

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
TOKEN_COLUMNS = ("tokens", "action_mask", "rollout_logprobs", "advantages", "old_logprobs")
SAMPLE_COLUMNS = ("group_ids", "rewards", "truncated")


@dataclass(frozen=True, kw_only=True)
class Pictured(Ragged):
    """A batch with routed experts for each token and image patches for each row."""

    experts: torch.Tensor = per_token()  # noqa: RUF009 — (N, layers, experts)
    patches: Items = per_row()  # noqa: RUF009 — values (M, pixels)


def batch_of(lengths: list[int]) -> Experience:
    """Return a batch in which each column has distinct entries, if the column's type allows it."""
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
    """Return each row as a tuple of lists and numbers."""
    edges = batch.offsets.tolist()
    return [
        (
            *(getattr(batch, name)[start:end].tolist() for name in TOKEN_COLUMNS),
            *(getattr(batch, name)[row].item() for name in SAMPLE_COLUMNS),
        )
        for row, (start, end) in enumerate(itertools.pairwise(edges))
    ]


# ---- rows


def test_offsets_are_the_starts_of_the_rows_and_the_end_of_the_last_row() -> None:
    assert offsets_of([2, 3]).tolist() == [0, 2, 5]
    assert offsets_of([]).tolist() == [0]


@given(LENGTHS, st.data())
def test_select_returns_rows_in_the_given_order(lengths: list[int], data: Any) -> None:
    batch = batch_of(lengths)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    rows = rows_of(batch)
    assert rows_of(batch.select(wanted)) == [rows[i] for i in wanted]


@given(LENGTHS, st.data())
def test_splitting_a_batch_equals_selecting_each_part(lengths: list[int], data: Any) -> None:
    batch = batch_of(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = batch.split([order[:cut], order[cut:]])
    assert [part.num_rows for part in parts] == [cut, len(lengths) - cut]
    rows = rows_of(batch)
    assert [row for part in parts for row in rows_of(part)] == [rows[i] for i in order]


def test_columns_that_have_not_been_computed_are_none() -> None:
    batch = batch_of([2, 3])
    assert batch.values is None
    assert batch.select([0]).to("cpu").values is None


def test_batch_may_be_empty() -> None:
    empty = batch_of([2, 3]).select([])
    assert (empty.num_rows, empty.num_tokens) == (0, 0)
    assert Experience.from_trajectories([]).num_rows == 0
    assert list(empty.similar_rows(1)) == []


def test_select_rejects_a_mask() -> None:
    with pytest.raises(ValueError, match=r"mask\.nonzero"):
        batch_of([2, 3]).select(torch.tensor([True, False]))


def test_select_copies_columns() -> None:
    batch = batch_of([2, 3])
    part = batch.select([1])
    part.tokens.zero_()
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4]


def test_copy_to_the_cpu_is_complete_when_it_returns() -> None:
    """PyTorch's non-blocking copies from a GPU return before their values have arrived."""
    batch = Ragged.of([[1, 2], [3]])
    with SecondDevice():
        copied = batch.to(DEVICE).to("cpu")
    assert copied.tokens.tolist() == [1, 2, 3]


def test_replace_keeps_other_columns() -> None:
    batch = batch_of([2, 1])
    changed = replace(batch, rewards=torch.tensor([7.0, 8.0]), values=torch.zeros(3))
    assert changed.rewards.tolist() == [7.0, 8.0]
    assert changed.values is not None and batch.values is None
    assert torch.equal(changed.tokens, batch.tokens)


def pictured(lengths: list[int], counts: list[int]) -> Pictured:
    tokens = sum(lengths)
    patches = torch.arange(sum(counts) * 3).view(-1, 3)
    return Pictured(
        tokens=torch.arange(tokens),
        offsets=offsets_of(lengths),
        experts=torch.arange(tokens * 4).view(-1, 2, 2),
        patches=Items(values=patches, offsets=offsets_of(counts)),
    )


def payload_of(batch: Pictured) -> list[tuple[Any, Any]]:
    """Return each row's experts and patches as lists."""
    tokens = batch.offsets.tolist()
    patches = batch.patches.offsets.tolist()
    return [
        (
            batch.experts[tokens[row] : tokens[row + 1]].tolist(),
            batch.patches.values[patches[row] : patches[row + 1]].tolist(),
        )
        for row in range(batch.num_rows)
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=8), st.data())
def test_payloads_follow_their_rows(sizes: list[tuple[int, int]], data: Any) -> None:
    batch = pictured([length for length, _ in sizes], [count for _, count in sizes])
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12))
    of_each_row = payload_of(batch)
    assert payload_of(batch.select(rows)) == [of_each_row[row] for row in rows]
    first, second = batch.split([rows, list(range(len(sizes)))])
    assert (
        payload_of(first) + payload_of(second) == [of_each_row[row] for row in rows] + of_each_row
    )
    assert payload_of(batch.to("cpu")) == of_each_row
    back = pickle.loads(pickle.dumps(batch))
    assert payload_of(back) == of_each_row


def test_payload_with_the_wrong_number_of_rows_raises_an_error_that_names_the_payload() -> None:
    with pytest.raises(ValueError, match=r"Pictured\.patches has 1 entries.*2 rows"):
        pictured([2, 1], [3])


def test_gather_pads_multidimensional_entries() -> None:
    batch = pictured([1, 2], [0, 0])
    block = batch.layout.pad(batch.experts)
    assert block.shape == (2, 2, 2, 2)
    assert block[0, 1].eq(0).all()
    assert torch.equal(block[1], batch.experts[1:])


def test_former_names_for_plugins_mean_rows() -> None:
    assert per_sample is per_row
    assert batch_of([2, 0, 3]).num_samples == 3


def test_row_of_token_maps_each_token_to_its_row() -> None:
    assert batch_of([2, 0, 3]).row_of_token().tolist() == [0, 0, 2, 2, 2]


def test_num_actions_counts_the_actions_of_each_row() -> None:
    batch = batch_of([2, 0, 3])  # tokens 0 and 3 are actions
    assert batch.num_actions.tolist() == [1, 0, 1]


# ---- wrong lengths


@pytest.mark.parametrize(
    ("column", "entries"), [("tokens", 4), ("advantages", 6), ("rewards", 3), ("group_ids", 1)]
)
def test_column_of_the_wrong_length_raises_an_error_that_names_the_column(
    column: str, entries: int
) -> None:
    with pytest.raises(
        ValueError, match=rf"Experience\.{column} has {entries} .* 2 rows with 5 tokens"
    ):
        replace(batch_of([2, 3]), **{column: torch.zeros(entries)})


def test_row_with_a_loss_mask_of_the_wrong_length_raises_an_error() -> None:
    with pytest.raises(ValueError, match="row 0 has 3 tokens, but 2 "):
        TokenRows.from_lists([[1, 2, 3]], [[True, False]])
    with pytest.raises(ValueError):
        TokenRows.from_lists([[1, 2, 3]], [])


def test_loss_mask_of_the_wrong_length_raises_an_error_even_if_the_totals_match() -> None:
    with pytest.raises(ValueError, match="row 0 has 3 tokens, but 2 "):
        TokenRows.from_lists([[1, 2, 3], [4, 5]], [[False, True], [False, True, True]])


# ---- padded blocks


def test_padded_block_has_padding_on_the_right() -> None:
    layout = Layout.of(offsets_of([2, 3, 1]))
    block = layout.pad(torch.tensor([1, 2, 3, 4, 5, 6]))
    assert block.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    assert layout.real.tolist() == [[True, True, False], [True] * 3, [True, False, False]]


def test_gathered_mask_is_false_at_padding_even_if_the_first_token_is_true() -> None:
    block = Layout.of(offsets_of([1, 2])).pad(torch.tensor([True, True, True]))
    assert block.tolist() == [[True, False], [True, True]]


def test_gathered_numbers_are_zero_at_padding_even_if_the_first_token_is_nan() -> None:
    block = Layout.of(offsets_of([1, 2])).pad(torch.tensor([float("nan"), 1.0, 2.0]))
    assert block[0, 1] == 0


@given(LENGTHS, st.data())
def test_scatter_after_gather_restores_only_the_gathered_rows(
    lengths: list[int], data: Any
) -> None:
    batch = batch_of(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1))
    layout = Layout.of(batch.offsets, torch.tensor(rows))
    column = torch.full((batch.num_tokens,), -1.0)
    layout.scatter(layout.pad(batch.rollout_logprobs), column)
    chosen = torch.isin(batch.row_of_token(), torch.tensor(rows))
    assert torch.equal(column[chosen], batch.rollout_logprobs[chosen])
    assert (column[~chosen] == -1).all()


def test_gather_passes_gradients_only_to_real_tokens() -> None:
    column = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    block = Layout.of(offsets_of([1, 2])).pad(column)
    (block * torch.tensor([[10.0, 100.0], [20.0, 30.0]])).sum().backward()
    assert column.grad is not None
    assert column.grad.tolist() == [10.0, 20.0, 30.0]


@given(LENGTHS, st.integers(1, 40))
def test_blocks_contain_each_token_once_within_the_token_budget(
    lengths: list[int], budget: int
) -> None:
    batch = batch_of(lengths)
    blocks = [Layout.of(batch.offsets, rows) for rows in batch.similar_rows(budget)]
    seen = torch.cat([block.positions[block.real] for block in blocks])
    assert sorted(seen.tolist()) == list(range(batch.num_tokens))
    assert sum(len(block.positions) for block in blocks) == batch.num_rows
    for block in blocks:
        assert block.positions.numel() <= budget or len(block.positions) == 1


@given(LENGTHS, st.integers(1, 40))
def test_row_lengths_do_not_increase_from_block_to_block(lengths: list[int], budget: int) -> None:
    batch = batch_of(lengths)
    widths = [batch.lengths[rows] for rows in batch.similar_rows(budget)]
    for longer, shorter in itertools.pairwise(widths):
        assert int(longer.min()) >= int(shorter.max())


@given(LENGTHS, st.integers(1, 60), st.none() | st.integers(1, 10), st.booleans())
def test_similar_rows_contain_each_row_once_and_respect_both_limits(
    lengths: list[int], budget: int, max_rows: int | None, padded: bool
) -> None:
    parts = [
        rows.tolist()
        for rows in batch_of(lengths).similar_rows(budget, max_rows=max_rows, padded=padded)
    ]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert max_rows is None or len(part) <= max_rows
        part_lengths = [lengths[row] for row in part]
        tokens = max(part_lengths) * len(part) if padded else sum(part_lengths)
        assert len(part) == 1 or tokens <= budget


def test_similar_rows_groups_by_length_and_counts_padding() -> None:
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


def test_from_trajectories_keeps_the_order_of_the_episodes() -> None:
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


def test_every_conversation_of_an_episode_becomes_a_row_with_the_episode_reward() -> None:
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
    packed = Experience.from_trajectories([several.packed(), plain.packed()])
    assert torch.equal(packed.tokens, batch.tokens)


def test_turn_rewards_accumulate_at_the_last_token_of_each_turn() -> None:
    plain = episode(0, 0, 1.0, StopReason.STOP)  # 2 tokens
    rewarded = replace(episode(1, 0, 1.0, StopReason.STOP), turn_rewards=((1, 0.5), (1, 0.25)))
    batch = Experience.from_trajectories([replace(plain, earlier=(plain,)), rewarded])
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [0, 0, 0, 0, 0, 0.75, 0]
    assert Experience.from_trajectories([plain]).turn_rewards is None


def test_columns_missing_from_some_episodes_are_none() -> None:
    first, second = (episode(0, sample, 1.0, StopReason.STOP) for sample in (0, 1))
    both = {"values": [0.5] * 2, "ref_logprobs": [0.0] * 2}
    batch = Experience.from_trajectories(
        [replace(first, columns=both), replace(second, columns={"values": [0.25] * 3})]
    )
    assert batch.values is not None and batch.values.tolist() == [0.5] * 2 + [0.25] * 3
    assert batch.ref_logprobs is None


def test_missing_reward_is_nan() -> None:
    batch = Experience.from_trajectories([episode(0, 0, None, StopReason.STOP)])
    assert batch.rewards.isnan().tolist() == [True]


def test_packed_episodes_give_the_same_batch() -> None:
    """Packing queued episodes in 32-bit arrays must not change any number."""
    episodes = [episode(index, 0, 1.0, StopReason.STOP) for index in (0, 1)]
    lists = [replace(t, columns={"values": [0.125] * len(t.tokens)}) for t in episodes]
    expected = Experience.from_trajectories(lists)
    batch = Experience.from_trajectories([t.packed() for t in lists])
    for column in fields(Experience):
        a, b = getattr(expected, column.name), getattr(batch, column.name)
        assert (a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)), column.name
