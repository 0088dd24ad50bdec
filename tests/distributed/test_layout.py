"""Which rank does what: laws that hold for every layout of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrlhf.distributed.layout import Axis, Place, RankLayout

sizes = st.integers(1, 5)
layouts = st.builds(RankLayout, dp=sizes, sp=sizes, tp=sizes)


@given(layouts)
def test_every_place_belongs_to_one_rank(layout: RankLayout) -> None:
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert places == sorted(places) and len(set(places)) == layout.dp * layout.sp * layout.tp
    assert max(places) == Place(layout.dp - 1, layout.sp - 1, layout.tp - 1)


@given(layouts, st.sets(st.sampled_from(["dp", "sp", "tp"])))
def test_peers_are_groups_of_equal_size_that_divide_the_ranks(layout: RankLayout, axes: set[Axis]) -> None:
    groups = {tuple(layout.peers(rank, *axes)) for rank in range(layout.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    assert {len(group) for group in groups} == {size}
    for group in groups:
        places = [layout.place(rank) for rank in group]
        assert all(len({getattr(place, axis) for place in places}) == 1 for axis in {"dp", "sp", "tp"} - axes)


@given(layouts)
def test_each_slice_has_its_ranks_side_by_side(layout: RankLayout) -> None:
    slices = layout.slice_ranks()
    assert [rank for ranks in slices for rank in ranks] == list(range(layout.world_size))
    assert [[layout.place(rank).dp for rank in ranks] for ranks in slices] == [
        [number] * layout.sp * layout.tp for number in range(layout.dp)
    ]


@given(layouts)
def test_ranks_draw_the_same_noise_if_and_only_if_they_share_a_weight(layout: RankLayout) -> None:
    seeds = [layout.noise_seed(42, rank) for rank in range(layout.world_size)]
    for rank, seed in enumerate(seeds):
        assert [peer for peer, other in enumerate(seeds) if other == seed] == layout.peers(rank, "tp")
    assert seeds[0] == 42  # one process draws what it would draw without a layout
