"""The geometry of the report's charts."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from openrlhf.observability.charts import (
    MAX_POINTS,
    Line,
    downsample,
    draw,
    frame_of,
    is_noisy,
    round_ticks,
    smoothed,
    tick_text,
)

VALUES = st.floats(-1e30, 1e30, allow_subnormal=False)


def line(values: list[float], first_step: int = 1) -> Line:
    return Line(label="m", points=downsample(list(enumerate(values, start=first_step))))


def chart_data(svg: Markup) -> dict:
    found = re.search(r'data-chart="([^"]*)"', svg)
    assert found
    return json.loads(Markup(found[1]).unescape())


def test_few_points_are_drawn_as_they_are():
    points = downsample([(3, 0.5), (7, 0.25)])
    assert [(p.step, p.mean, p.low, p.high) for p in points] == [(3, 0.5, 0.5, 0.5), (7, 0.25, 0.25, 0.25)]


def test_neighbours_share_a_point_that_keeps_their_mean_and_extremes():
    points = downsample([(1, 0.0), (2, 4.0), (3, 2.0), (4, 7.0)], limit=2)
    assert [(p.step, p.mean, p.low, p.high) for p in points] == [(2, 2, 0, 4), (4, 4.5, 2, 7)]


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 100_003])
def test_a_long_run_is_drawn_with_a_bounded_number_of_points(count):
    points = downsample([(step, math.sin(step)) for step in range(count)])
    assert len(points) <= MAX_POINTS
    assert points[-1].step == count - 1


def test_one_spike_in_a_long_run_stays_visible():
    series = [(step, 1.0) for step in range(10_000)]
    series[1234] = (1234, 50.0)
    assert max(point.high for point in downsample(series)) == 50.0


@given(st.lists(VALUES, min_size=1, max_size=50))
def test_every_point_lies_inside_the_frame(values):
    frame = frame_of([line(values)])
    assert frame.low < frame.high
    assert all(frame.low <= value <= frame.high for value in values)
    assert all(frame.low <= tick <= frame.high for tick in frame.ticks)


def test_the_range_starts_at_zero_only_where_zero_is_near():
    assert frame_of([line([0.2, 1.0])]).low == 0
    assert frame_of([line([120.0, 150.0])]).low > 100
    assert frame_of([line([-1.0, -0.2])]).high == 0


def test_ticks_are_round_numbers():
    assert round_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert round_ticks(118, 152) == [120, 130, 140, 150]
    assert round_ticks(-0.07, 0.06, 3) == pytest.approx([-0.05, 0, 0.05])


@given(VALUES, st.floats(1e-6, 1e6))
def test_there_are_always_two_ticks_or_more_and_their_labels_differ(low, width):
    high = low + width * max(1.0, abs(low))
    ticks = round_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    labels = [tick_text(tick, ticks[1] - ticks[0]) for tick in ticks]
    assert len(set(labels)) == len(labels), labels


def test_tick_labels_are_short():
    assert [tick_text(v, 0.2) for v in (0, 0.2, 1.0)] == ["0", "0.2", "1.0"]
    assert tick_text(20_000, 2000) == "20k"
    assert [tick_text(v, 2e-6) for v in (8e-6, 1e-5)] == ["8e-6", "1.0e-5"]


def test_smoothing_keeps_a_constant_and_does_not_lag_behind_a_slope():
    assert smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    slope = [float(i) for i in range(101)]
    assert smoothed(slope)[50] == pytest.approx(50.0)


def test_only_curves_that_jump_are_smoothed():
    assert is_noisy([0.0, 1.0] * 20)
    assert not is_noisy([i / 40 for i in range(40)])
    assert not is_noisy([0.0, 1.0] * 10)  # few enough to be seen as they are


def test_a_chart_carries_its_numbers_and_escapes_its_label():
    svg = draw([line([0.5, 0.25]), line([1.0], first_step=5)], label='a "b" <c>')
    data = chart_data(svg)
    assert data["lines"] == [{"x": [1, 2], "y": [0.5, 0.25]}, {"x": [5], "y": [1.0]}]
    assert data["range"][:2] == [1, 5]
    assert 'aria-label="a &#34;b&#34; &lt;c&gt;"' in svg


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-300], [-5.0], [1e99, -1e99]])
def test_flat_single_and_extreme_curves_can_be_drawn(values):
    assert "nan" not in draw([line(values)], label="m")
