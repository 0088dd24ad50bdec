"""Utilization of models, alone and side by side, compared with values computed by hand."""

from __future__ import annotations

import pytest

from openrlhf.observability.metrics import values
from openrlhf.trainers.utilisation import utilisation


def test_idle_and_side_by_side_by_hand() -> None:
    policy = [(0.0, 2.0), (2.0, 4.0)]
    critic, reward = [(1.0, 3.0)], [(2.5, 3.5)]
    # 4 + 2 + 1 of 3 x 5 seconds; from 1 to 3.5 several of them, from 0 to 4 any
    assert values(utilisation([policy, critic, reward], 5.0)) == pytest.approx(
        {"timing/models_idle": 8 / 15, "timing/models_overlap": 2.5 / 4}
    )


def test_one_group_never_works_beside_itself() -> None:
    assert values(utilisation([[(0.0, 1.0), (1.0, 2.0)]], 2.0)) == {
        "timing/models_idle": 0.0,
        "timing/models_overlap": 0.0,
    }
