"""Metrics for the mismatch between engine and trainer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.observability.metrics import Mean
from openrlhf.workers.policy import mismatch_metrics
from tests.reference import policy


def measured(*columns: torch.Tensor) -> dict[str, float]:
    return {name: metric.value for name, metric in mismatch_metrics(*columns).items()}


def test_mismatch_metrics_equal_values_computed_by_hand() -> None:
    """Δ = log π_rollout − log π_old is 0.2 and −1.7, and the third token is not an action."""
    rollout, old = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.2, -0.3, -9.0]])
    mask = torch.tensor([[True, True, False]])
    assert measured(old, rollout, mask) == pytest.approx(
        {
            "train/vllm_kl": -0.75,
            "train/logprob_gap_mean": 0.95,
            "train/logprob_gap_max": 1.7,
            "train/rollout_ratio": (math.exp(-0.2) + math.exp(1.7)) / 2,
            "train/rollout_ratio_outside": 0.5,  # exp(1.7) is above 5
        }
    )


@given(
    block=st.lists(
        st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=1, max_size=12
    )
)
def test_mismatch_metrics_match_the_reference_loop(block: list[tuple[float, float, bool]]) -> None:
    old, rollout, mask = ([list(column)] for column in zip(*block, strict=True))
    exact = (torch.tensor([column], dtype=torch.float64) for column in (*old, *rollout))
    seen = mismatch_metrics(*exact, torch.tensor(mask))
    tokens, kl, gap, largest, ratio = policy.mismatch(old, rollout, mask)
    assert seen["train/logprob_gap_max"].value == pytest.approx(largest)
    for name, total in {"vllm_kl": kl, "logprob_gap_mean": gap, "rollout_ratio": ratio}.items():
        mean = seen[f"train/{name}"]
        assert isinstance(mean, Mean)
        assert (mean.sum, mean.count) == (pytest.approx(total), tokens)


def test_mismatch_metrics_without_action_tokens_are_zero() -> None:
    empty = torch.zeros(2, 3)
    none = torch.zeros(2, 3, dtype=torch.bool)
    means = [
        metric
        for metric in mismatch_metrics(empty, empty, none).values()
        if isinstance(metric, Mean)
    ]
    assert {(mean.sum, mean.count) for mean in means} == {(0.0, 0)}
