"""Tests for ring attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.models.ring_attention import flash_computes
from tests.ranks import run_ranks


def test_ring_attention_equals_dense_attention_in_float64():
    run_ranks(4, "tests.models.ring_ranks")


@pytest.mark.parametrize(
    ("head_dim", "capability", "supported"),
    [(64, (9, 0), True), (512, (9, 0), False), (20, (9, 0), False), (64, (7, 5), False)],
)
def test_flash_attention_supports_only_some_head_sizes_and_gpus(
    head_dim: int,
    capability: tuple[int, int],
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    states: Any = SimpleNamespace(
        is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=(2, 3, 6, head_dim)
    )
    assert flash_computes(states, states) is supported
