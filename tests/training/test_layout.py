"""Tests for properties that every layout of ranks has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.training.layout import RankLayout

sizes = st.integers(1, 5)
layouts = st.builds(RankLayout, dp=sizes, sp=sizes, tp=sizes)


@given(layouts)
def test_ranks_in_a_slice_are_consecutive(layout: RankLayout) -> None:
    slices = layout.slice_ranks()
    assert [rank for ranks in slices for rank in ranks] == list(range(layout.world_size))
    assert [len(ranks) for ranks in slices] == [layout.sp * layout.tp] * layout.dp


@given(layouts)
def test_noise_seeds_are_equal_only_for_ranks_that_share_a_weight(layout: RankLayout) -> None:
    seeds = [layout.noise_seed(42, rank) for rank in range(layout.world_size)]
    for rank, seed in enumerate(seeds):
        sharing = [peer // layout.tp == rank // layout.tp for peer in range(layout.world_size)]
        assert [other == seed for other in seeds] == sharing
    assert seeds[0] == 42  # a single process uses the seed from the flags


@given(layout=layouts)
def test_layout_from_flags_divides_processes_by_sequence_and_tensor_parallel_ranks(
    layout: RankLayout,
) -> None:
    ds = DeepSpeedConfig(ring_attn_size=layout.sp, tensor_parallel_size=layout.tp)
    assert RankLayout.from_flags(ds, processes=layout.world_size) == layout


def test_layout_from_flags_rejects_an_indivisible_number_of_processes() -> None:
    ds = DeepSpeedConfig(ring_attn_size=2, tensor_parallel_size=2)
    with pytest.raises(
        UserError, match=r" 6\b.*--ds\.ring_attn_size 2\b.*--ds\.tensor_parallel_size 2"
    ):
        RankLayout.from_flags(ds, processes=6)
