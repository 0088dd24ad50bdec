"""Tests for utilization and overlap metrics against values computed by hand."""

from __future__ import annotations

import pytest

from openrlhf.observability.metrics import values
from openrlhf.trainers.utilisation import utilisation


def test_idle_and_overlap_fractions_match_hand_computed_values() -> None:
    policy = [(0.0, 2.0), (2.0, 4.0)]
    critic, reward = [(1.0, 3.0)], [(2.5, 3.5)]
    # The groups are busy for 4 + 2 + 1 of 3 x 5 seconds.
    # At least one group is busy from 0 to 4, and several groups are busy from 1 to 3.5.
    assert values(utilisation([policy, critic, reward], 5.0)) == pytest.approx(
        {"timing/models_idle": 8 / 15, "timing/models_overlap": 2.5 / 4}
    )


def test_single_group_has_no_overlap() -> None:
    assert values(utilisation([[(0.0, 1.0), (1.0, 2.0)]], 2.0)) == {
        "timing/models_idle": 0.0,
        "timing/models_overlap": 0.0,
    }
