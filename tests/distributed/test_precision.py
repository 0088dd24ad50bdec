"""Weights in bfloat16 are trained in float32: steps that are too small for bfloat16 add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.precision_worker import RATE, STEPS
from tests.ranks import run_ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_below_the_spacing_of_bfloat16_add_up_in_every_zero_stage(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, "tests.distributed.precision_worker", str(tmp_path / "weights.pt"))
    one, step = torch.ones((), dtype=torch.bfloat16), torch.tensor(RATE, dtype=torch.bfloat16)
    assert one - step == one  # without float32 the weight would stay where it is
    for stage, weight in torch.load(tmp_path / "weights.pt").items():
        expected = torch.full((8, 8), 1 - STEPS * RATE)
        torch.testing.assert_close(weight, expected, atol=2**-8, rtol=0, msg=f"ZeRO stage {stage}")
