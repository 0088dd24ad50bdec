"""Tests for reducing logged metrics."""

import math
import pickle
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.observability.metrics import Deviation, Last, Max, Mean, merge_all, values


def test_merged_mean_of_unequal_parts_equals_overall_mean():
    parts = [{"train/kl": Mean(1 + 2 + 3, 3)}, {"train/kl": Mean(10, 1)}]
    assert merge_all(parts)["train/kl"].value == pytest.approx((1 + 2 + 3 + 10) / 4)


def test_max_is_largest_value_of_all_parts():
    assert merge_all([{"m": Max(2.0)}, {"m": Max(-1.0)}, {"m": Max(2.5)}]) == {"m": Max(2.5)}


@pytest.mark.parametrize("order", [[math.nan, 1.0], [1.0, math.nan]])
def test_max_is_nan_if_any_part_is_nan(order):
    merged = merge_all({"m": Max(value)} for value in order)
    assert math.isnan(merged["m"].value)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), min_size=1, max_size=5))
def test_deviation_does_not_depend_on_how_values_are_split(parts):
    whole = [number for part in parts for number in part]
    merged = merge_all({"std": Deviation.of(part)} for part in parts)["std"]
    assert merged.value == pytest.approx(
        statistics.stdev(whole) if len(whole) > 1 else 0.0, rel=1e-6, abs=1e-9
    )
    assert merged.mean == pytest.approx(statistics.mean(whole), abs=1e-9)


def test_deviation_is_accurate_for_small_spread_around_large_mean():
    parts = [
        {"std": Deviation.of([1e9 + 0.25, 1e9 - 0.25])},
        {"std": Deviation.of([1e9 + 0.25, 1e9 - 0.25])},
    ]
    assert merge_all(parts)["std"].value == pytest.approx(0.25 * math.sqrt(4 / 3), rel=1e-6)


def test_last_is_value_of_last_part():
    assert merge_all([{"lr": Last(1.0)}, {"lr": Last(0.5)}]) == {"lr": Last(0.5)}


def test_merge_all_reduces_metric_over_ranks_that_report_it():
    ranks = [{"a": Mean(4, 2)}, {"b": Mean(1, 1)}, {}, {"a": Mean(2, 1), "c": Last(7)}]
    assert merge_all(ranks) == {"a": Mean(6, 3), "b": Mean(1, 1), "c": Last(7)}


def test_merge_all_does_not_modify_its_inputs():
    first, second = {"a": Mean(1, 1)}, {"a": Mean(3, 1)}
    merge_all([first, second])
    assert (first, second) == ({"a": Mean(1, 1)}, {"a": Mean(3, 1)})


def test_values_omits_a_mean_without_samples():
    logged = values({"seen": Mean(3, 2), "unseen": Mean(0, 0), "top": Max(2), "lr": Last(1)})
    assert logged == {"seen": 1.5, "top": 2.0, "lr": 1.0}


def test_empty_part_does_not_change_mean():
    assert merge_all([{"a": Mean(0.0, 0)}, {"a": Mean(5, 2)}])["a"].value == 2.5


def test_metrics_survive_pickling():
    metrics = {"a": Mean(1, 2), "b": Max(3), "c": Last(4)}
    assert pickle.loads(pickle.dumps(metrics)) == metrics
