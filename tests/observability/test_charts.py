"""Geometry of the charts in the report."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.observability.charts import (
    BOTTOM,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    draw,
    is_noisy,
    round_ticks,
    thin_out,
    trend,
    value_range,
)

VALUES = st.floats(-1e30, 1e30, allow_subnormal=False)


def curve(values: list[float], first_step: int = 1) -> list[tuple[float, float]]:
    return list(enumerate(values, start=first_step))


def test_thin_out_keeps_short_series_unchanged():
    assert thin_out([(3, 0.5), (7, 0.25)]) == [(3, 0.5), (7, 0.25)]


def test_thin_out_keeps_lowest_and_highest_value_of_each_group_in_order():
    points = curve([0.0, 4.0, 2.0, 7.0, 9.0, 5.0, 6.0, 3.0])
    assert thin_out(points, limit=4) == [(1, 0.0), (4, 7.0), (5, 9.0), (8, 3.0)]


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 100_003])
def test_thin_out_limits_number_of_points(count):
    points = thin_out([(step, math.sin(step)) for step in range(count)])
    assert len(points) <= MAX_POINTS
    assert points == sorted(points)


def test_thin_out_keeps_single_spike_of_long_series():
    series = [(step, 1.0) for step in range(10_000)]
    series[1234] = (1234, 50.0)
    assert (1234, 50.0) in thin_out(series)


@given(st.lists(VALUES, min_size=1, max_size=50))
def test_value_range_contains_every_value_and_every_tick(values):
    low, high = value_range(values)
    assert low < high
    assert all(low <= value <= high for value in values)
    assert all(low <= tick <= high for tick in round_ticks(low, high))


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.0, 0.0], (0, 1)),
        ([3.0, 3.0], (0, 3.18)),
        ([-3.0, -3.0], (-3.18, 0)),
        ([0.2, 1.0], (0, 1.06)),
        ([-1.0, -0.2], (-1.06, 0)),
        ([100.0, 150.0], (97, 153)),
    ],
)
def test_value_range_includes_zero_if_values_are_constant_or_near_zero(values, ends):
    assert value_range(values) == pytest.approx(ends)


def test_round_ticks_returns_round_numbers():
    assert round_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert round_ticks(118, 152) == [120, 130, 140, 150]
    assert round_ticks(-0.07, 0.06, 3) == pytest.approx([-0.05, 0, 0.05])


@given(VALUES, st.floats(1e-6, 1e6))
def test_chart_has_two_to_seven_ticks_with_distinct_labels(low, width):
    chart = draw([curve([low, low + width * max(1.0, abs(low))])])
    labels = [label for _, label in chart.values]
    assert 2 <= len(labels) <= 7
    assert len(set(labels)) == len(labels), labels


def test_tick_labels_are_short():
    assert [label for _, label in draw([curve([0.0, 0.3])]).values] == ["0", "0.1", "0.2", "0.3"]
    assert [label for _, label in draw([curve([0.0, 9e-6])]).values] == [
        "0",
        "2e-06",
        "4e-06",
        "6e-06",
        "8e-06",
    ]


def test_trend_keeps_constant_and_does_not_lag_behind_slope():
    assert [value for _, value in trend(curve([2.0] * 50))] == pytest.approx([2.0] * 50)
    slope = dict(trend(curve([float(i) for i in range(201)], first_step=0)))
    assert slope[100] == pytest.approx(100.0)
    assert max(slope) == 200


def test_trend_of_long_series_averages_all_values_and_not_only_extremes():
    mostly_zero = [(step, float(step % 50 == 0)) for step in range(20_000)]
    means = [value for _, value in trend(mostly_zero)]
    assert len(means) <= 82
    assert means == pytest.approx([0.02] * len(means), abs=0.002)


def test_only_noisy_curves_have_trend():
    assert is_noisy(curve([0.0, 1.0] * 20))
    assert not is_noisy(curve([i / 40 for i in range(40)]))
    assert not is_noisy(curve([0.0, 1.0] * 10))  # too few points to need a trend
    assert [
        bool(line.trend) for line in draw([curve([0.0, 1.0] * 20), curve([0.0, 1.0])]).lines
    ] == [True, False]


def test_curve_spans_plot_area_and_short_curve_has_dots():
    (line,) = draw([curve([0.0, 1.0], first_step=5)]).lines
    assert line.dots[0] == (LEFT, BOTTOM)
    assert line.dots[1][0] == RIGHT
    assert TOP < line.dots[1][1] < TOP + 10  # a margin above the highest value
    assert line.path == "M" + "L".join(f"{x} {y}" for x, y in line.dots)
    assert draw([curve([0.0] * 30)]).lines[0].dots == []


def test_chart_data_has_numbers_of_every_curve():
    chart = draw([curve([0.5, 0.25]), curve([1 / 3], first_step=5)])
    assert chart.data == {
        "range": [1, 5],
        "lines": [{"x": [1, 2], "y": [0.5, 0.25]}, {"x": [5], "y": [0.33333]}],
    }
    assert [label for _, label in chart.steps] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-300], [-5.0], [1e99, -1e99]])
def test_draw_accepts_constant_single_and_extreme_values(values):
    assert "nan" not in draw([curve(values)]).lines[0].path
