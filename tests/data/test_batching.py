"""Batches respect size limits, use every row exactly once, and can be resumed at any row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config.learning import RLTrainConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import TokenRows
from openrlhf.data.batching import (
    ResumableSampler,
    balanced_partition,
    batches_of_padded_tokens,
    batches_of_rows,
    batches_of_tokens,
    permutation,
    row_costs,
)
from openrlhf.models.ring_attention import CHUNKS_PER_RANK, RingRow
from openrlhf.models.shared_prefixes import SharedPrefixes
from openrlhf.ring import Ring
from openrlhf.workers.base import MicroBatchLimits

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def rows_of(groups: list[list[int]]) -> list[int]:
    return sorted(row for group in groups for row in group)


def tokens_of(groups: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[row] for row in group) for group in groups]


# ---- balancing


def test_differencing_splits_rows_more_evenly_than_a_greedy_algorithm() -> None:
    lengths = [8, 7, 6, 5, 4]  # a greedy split gives 8 + 5 + 4 and 7 + 6
    assert sorted(tokens_of(balanced_partition(lengths, 2), lengths)) == [14, 16]


@given(LENGTHS, st.data())
def test_partition_contains_every_row_once_and_has_no_empty_group(
    lengths: list[int], data: Any
) -> None:
    parts = data.draw(st.integers(1, len(lengths)))
    groups = balanced_partition(lengths, parts)
    assert len(groups) == parts and all(groups)
    assert rows_of(groups) == list(range(len(lengths)))


@given(st.lists(st.integers(0, 3), min_size=3, max_size=12))
def test_no_group_is_empty_even_if_all_rows_are_empty(lengths: list[int]) -> None:
    assert all(balanced_partition(lengths, 3))


@given(LENGTHS, st.data())
def test_group_token_counts_differ_by_at_most_the_longest_row(
    lengths: list[int], data: Any
) -> None:
    tokens = tokens_of(
        balanced_partition(lengths, data.draw(st.integers(1, len(lengths)))), lengths
    )
    assert max(tokens) - min(tokens) <= max(lengths)


def test_fewer_rows_than_groups_raises_error() -> None:
    with pytest.raises(ValueError, match="2 rows cannot be split into 3"):
        balanced_partition([1, 2], 3)


# ---- micro-batches


@given(st.lists(st.integers(1, 120), min_size=1, max_size=40), st.integers(20, 60))
def test_row_longer_than_the_token_budget_gets_its_own_micro_batch(
    lengths: list[int], budget: int
) -> None:
    batches = batches_of_tokens(lengths, budget)
    assert rows_of(batches) == list(range(len(lengths)))
    assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= budget for rows in batches)


def test_batches_by_row_count_keep_the_order_and_have_nearly_equal_sizes() -> None:
    assert batches_of_rows(range(5), 2) == [[0, 1], [2], [3, 4]]


@given(st.integers(1, 40), st.integers(1, 8))
def test_batches_never_exceed_the_row_limit(count: int, size: int) -> None:
    batches = batches_of_rows(range(count), size)
    assert [row for batch in batches for row in batch] == list(range(count))
    assert all(1 <= len(batch) <= size for batch in batches)
    assert len(batches) == -(-count // size)


@given(LENGTHS, st.integers(50, 120))
def test_micro_batches_never_exceed_the_token_budget(lengths: list[int], budget: int) -> None:
    batches = batches_of_tokens(lengths, budget)
    assert rows_of(batches) == list(range(len(lengths)))
    assert all(batches) and max(tokens_of(batches, lengths)) <= budget


@given(LENGTHS, st.integers(50, 120))
def test_number_of_micro_batches_is_close_to_the_minimum(lengths: list[int], budget: int) -> None:
    """With more micro-batches, two of them could be merged without exceeding the budget."""
    batches = batches_of_tokens(lengths, budget)
    assert len(batches) <= max(1, 2 * sum(lengths) / budget)


# Long-tailed row lengths, some of which exceed the budget.
# An attention length makes attention cheap (large value), expensive (small value) or free (None).
ANY_LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 400)), min_size=1, max_size=40)
ATTENTION = st.one_of(st.none(), st.integers(1, 10_000))


@given(ANY_LENGTHS, st.integers(1, 300), ATTENTION, st.integers(1, 50))
def test_token_budget_holds_for_every_attention_cost_and_number_of_batches(
    lengths: list[int], budget: int, attention: int | None, at_least: int
) -> None:
    fewest = batches_of_tokens(lengths, budget, attention_length=attention)
    batches = batches_of_tokens(lengths, budget, attention_length=attention, at_least=at_least)
    assert rows_of(batches) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= budget
    # If ranks agree on the largest number of batches, each rank with enough rows gets that number.
    assert len(batches) == max(len(fewest), min(at_least, len(lengths)))


@given(st.lists(ANY_LENGTHS, min_size=1, max_size=5), st.integers(1, 300), ATTENTION)
def test_ranks_with_enough_rows_run_the_same_number_of_micro_batches(
    ranks: list[list[int]], budget: int, attention: int | None
) -> None:
    limits = MicroBatchLimits(size=1, max_tokens=budget, packed=True, attention_length=attention)
    tensors = [torch.tensor(lengths) for lengths in ranks]
    most = max(len(limits.cut(lengths)) for lengths in tensors)
    for lengths in tensors:
        assert len(limits.cut(lengths, at_least=most)) == min(most, len(lengths))


@given(ANY_LENGTHS, ATTENTION, st.data())
def test_costs_of_ranks_differ_by_at_most_the_largest_row(
    lengths: list[int], attention: int | None, data: Any
) -> None:
    costs = row_costs(lengths, attention)
    ranks = data.draw(st.integers(1, len(lengths)))
    totals = tokens_of(balanced_partition(costs, ranks), costs)
    assert max(totals) - min(totals) <= max(costs)


def test_long_row_costs_more_than_short_rows_with_the_same_total_number_of_tokens() -> None:
    """Attention costs as much as the weights at A = 100 tokens.

    Four rows of 100 tokens cost 4 · 100 · 200, and one row of 400 tokens costs 400 · 500.
    """
    lengths = [400, *[100] * 6]
    assert row_costs([400, 100], 100) == [200_000, 20_000]
    assert balanced_partition(row_costs(lengths, 100), 2) == [[0], [1, 2, 3, 4, 5, 6]]
    by_tokens = balanced_partition(row_costs(lengths, None), 2)
    assert sorted(tokens_of(by_tokens, lengths)) == [500, 500]


@given(ANY_LENGTHS, st.integers(1, 300), st.integers(1, 50))
def test_padding_counts_toward_the_token_budget(
    lengths: list[int], budget: int, at_least: int
) -> None:
    limits = MicroBatchLimits(size=1, max_tokens=budget)
    batches = limits.cut(torch.tensor(lengths), at_least=at_least)
    assert rows_of(batches) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
    fewest = batches_of_padded_tokens(lengths, budget)
    assert len(batches) == max(len(fewest), min(at_least, len(lengths)))


@given(ANY_LENGTHS, st.integers(CHUNKS_PER_RANK, 300), st.integers(1, 8), st.integers(1, 3))
def test_ring_rank_never_holds_more_tokens_than_its_budget(
    lengths: list[int], budget: int, sp: int, tp: int
) -> None:
    ds = DeepSpeedConfig(ring_attn_size=sp, tensor_parallel_size=tp, packing_samples=True)
    train = RLTrainConfig(dynamic_batch_enable=True, max_tokens_per_gpu=budget)
    limits = MicroBatchLimits.of_training(train, ds)
    ring = Ring(group=None, ranks=tuple(range(sp)), rank=0)
    for rows in limits.cut(torch.tensor(lengths)):
        held = sum(lengths[row] for row in rows)
        if sp > 1:
            row = RingRow(ring, [lengths[row] for row in rows])
            held = len(row.places(torch.device("cpu")))
        # Tensor-parallel ranks share the channels of the same tokens.
        assert len(rows) == 1 or held <= budget * tp


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(0, 60),
    st.integers(1, 300),
    st.integers(1, 4),
)
def test_shared_prefixes_never_increase_the_tokens_of_a_micro_batch(
    answers: list[int], prompt: int, budget: int, prompts: int
) -> None:
    lengths = [prompt + answer for _ in range(prompts) for answer in answers]
    rows_of_prompts = [number for number in range(prompts) for _ in answers]
    for batch in batches_of_tokens(lengths, budget, attention_length=50):
        texts = []
        for row in batch:
            own = 1000 * (row + 1)
            tail = list(range(own, own + lengths[row] - prompt))
            texts.append([rows_of_prompts[row]] * prompt + tail)
        rows = TokenRows.from_lists(texts, [[True] * len(text) for text in texts])
        shared = SharedPrefixes.of(rows.tokens, rows.offsets)
        computed = rows.num_tokens if shared is None else len(shared.computed)
        assert len(batch) == 1 or computed <= budget


def test_padded_rows_are_grouped_by_length_and_packed_rows_stay_in_order() -> None:
    lengths = torch.tensor([9, 2, 8, 1])
    assert MicroBatchLimits(size=2).cut(lengths) == [[0, 2], [1, 3]]
    assert MicroBatchLimits(size=2, packed=True).cut(lengths) == [[0, 1], [2, 3]]


def test_empty_input_gives_no_micro_batches() -> None:
    assert batches_of_rows([], 4) == batches_of_tokens([], 4) == []


# ---- order of rows in an epoch


def ranks(num_rows: int, dp_size: int, **flags: Any) -> list[list[int]]:
    """Return the rows that each rank visits in the next epoch."""
    samplers = [
        ResumableSampler(num_rows, **{"seed": 0} | flags, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    return [list(sampler) for sampler in samplers]


def test_rows_are_assigned_to_ranks_in_turn() -> None:
    order = permutation(7, seed=3).tolist()
    assert ranks(7, 2, seed=3) == [order[0:6:2], order[1:6:2]]
    assert ranks(7, 2, seed=3, drop_last=False) == [order[0::2], order[1::2]]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4))
def test_drop_last_gives_every_rank_the_same_number_of_rows_in_full_batches(
    num_rows: int, dp_size: int, per_rank: int
) -> None:
    batch_size = dp_size * per_rank
    drawn = ranks(num_rows, dp_size, batch_size=batch_size)
    assert {len(rows) for rows in drawn} == {num_rows // batch_size * per_rank}
    together = [row for rows in drawn for row in rows]
    assert len(set(together)) == len(together)


@given(st.integers(0, 60), st.integers(1, 5))
def test_without_drop_last_every_row_is_visited_by_exactly_one_rank(
    num_rows: int, dp_size: int
) -> None:
    drawn = ranks(num_rows, dp_size, drop_last=False)
    assert rows_of(drawn) == list(range(num_rows))
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1


@given(st.integers(1, 4))
def test_rows_of_a_batch_do_not_depend_on_the_number_of_ranks(half: int) -> None:
    batch = 2 * half
    alone = ranks(20, 1, batch_size=batch)[0]
    both = ranks(20, 2, batch_size=batch)
    for step in range(20 // batch):
        shared = [row for rows in both for row in rows[step * half : (step + 1) * half]]
        assert sorted(shared) == sorted(alone[step * batch : (step + 1) * batch])


def test_row_order_depends_only_on_the_sum_of_seed_and_epoch() -> None:
    first, second = (list(ResumableSampler(20, seed=3, consumed=taken)) for taken in (0, 20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second == list(ResumableSampler(20, seed=4))


def test_shuffling_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(ResumableSampler(20, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(0, 23))
def test_resuming_skips_consumed_rows_and_finishes_the_epoch(taken: int) -> None:
    two_epochs = [
        row for epoch in (0, 1) for row in ResumableSampler(12, seed=1, consumed=12 * epoch)
    ]
    rest = ResumableSampler(12, seed=1, consumed=taken)
    assert list(rest) == list(rest) == two_epochs[taken : (taken // 12 + 1) * 12]


@given(st.integers(0, 11))
def test_resuming_with_a_different_number_of_ranks_visits_the_remaining_rows(steps: int) -> None:
    taken = 2 * steps
    left = list(ResumableSampler(24, seed=1, consumed=taken))
    assert sorted(rows_of(ranks(24, 2, seed=1, consumed=taken))) == sorted(left)
