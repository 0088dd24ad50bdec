"""The lines drawn in the report's charts."""

import math

import pytest

from openrlhf.observability.charts import MAX_POINTS, is_noisy, make_lines, thin_out, trend


def curve(values: list[float], first_step: int = 1) -> list[tuple[float, float]]:
    return list(enumerate(values, start=first_step))


def test_thin_out_returns_short_curve_unchanged():
    assert thin_out([(3, 0.5), (7, 0.25)]) == [(3, 0.5), (7, 0.25)]


def test_thin_out_keeps_minimum_and_maximum_of_each_group_in_order():
    points = curve([0.0, 4.0, 2.0, 7.0, 9.0, 5.0, 6.0, 3.0])
    assert thin_out(points, limit=4) == [(1, 0.0), (4, 7.0), (5, 9.0), (8, 3.0)]


def test_thin_out_keeps_first_and_last_point():
    points = thin_out([(step, math.sin(step)) for step in range(100_003)])
    assert points[0] == (0, 0.0)
    assert points[-1] == (100_002, math.sin(100_002))


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 100_003])
def test_thin_out_limits_number_of_points(count):
    points = thin_out([(step, math.sin(step)) for step in range(count)])
    assert len(points) <= MAX_POINTS + 2
    assert points == sorted(points)


def test_thin_out_keeps_single_spike_in_long_curve():
    series = [(step, 1.0) for step in range(10_000)]
    series[1234] = (1234, 50.0)
    assert (1234, 50.0) in thin_out(series)


def test_line_values_keep_enough_digits_to_avoid_double_rounding():
    [line] = make_lines({"loss": [(1, 4.215486)]})
    assert f"{line.values[0]:.4g}" == "4.215"


def test_trend_of_a_constant_is_constant_and_trend_of_a_slope_does_not_lag():
    assert [value for _, value in trend(curve([2.0] * 50))] == pytest.approx([2.0] * 50)
    slope = dict(trend(curve([float(i) for i in range(201)], first_step=0)))
    inner = [step for step in slope if 10 <= step <= 190]  # points with a full averaging window
    assert len(inner) > 50
    assert [slope[step] for step in inner] == pytest.approx(inner)
    assert max(slope) == 200


def test_trend_of_long_curve_averages_all_values():
    mostly_zero = [(step, float(step % 50 == 0)) for step in range(20_000)]
    means = [value for _, value in trend(mostly_zero)]
    assert len(means) <= 82
    assert means == pytest.approx([0.02] * len(means), abs=0.002)


@pytest.mark.parametrize("count", [2, 80, 81, 82, 159, 160, 161, 240])
def test_trend_has_limited_points_and_includes_last_step(count):
    means = trend(curve([1.0] * count))
    assert len(means) <= 81
    assert means[-1] == (count, 1.0)


def test_only_noisy_curves_have_a_trend_line():
    assert is_noisy(curve([0.0, 1.0] * 20))
    assert not is_noisy(curve([i / 40 for i in range(40)]))
    assert not is_noisy(curve([0.0, 1.0] * 10))  # too few points for a trend line
    lines = make_lines({"noisy": curve([0.0, 1.0] * 20), "short": curve([0.0, 1.0])})
    assert [(line.label, line.color, line.pale) for line in lines] == [
        ("noisy", 0, True),
        ("", 0, False),
        ("short", 1, False),
    ]


def test_every_curve_has_a_line_with_its_values():
    first, second = make_lines({"a": curve([0.5, 0.25]), "b": curve([1 / 3], first_step=5)})
    assert (first.steps, first.values) == ([1, 2], [0.5, 0.25])
    assert (second.steps, second.values) == ([5], [0.33333333])


@pytest.mark.parametrize("values", [[0.0], [3.0] * 40, [1e-300], [-5.0], [1e99, -1e99] * 20])
def test_lines_with_constant_single_or_extreme_values_are_finite(values):
    for line in make_lines({"x": curve(values)}):
        assert all(map(math.isfinite, line.values))
