"""Tests that accumulation windows may be split in any way and skip nonfinite steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.reference.supervised import mean_loss
from tests.tiny import save_tiny_model
from tests.training.window_worker import OPTIMIZER, STEPS, batch

LAYOUTS = [
    "zero0-micro8-padded",
    "zero0-micro3-packed",
    "zero1-micro3-padded",
    "zero2-micro8-packed",
    "zero2-micro1-padded",
    "zero3-micro3-packed",
]
POISONED = [
    f"zero{stage}-micro3-packed-{dtype}-poisoned"
    for stage in range(4)
    for dtype in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: str) -> dict[str, Any]:
    """Take the same steps in a plain float64 torch loop that computes full logits row by row."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        hf.parameters(),
        lr=OPTIMIZER.adam.lr,
        betas=OPTIMIZER.adam.betas,
        eps=OPTIMIZER.adam.eps,
        weight_decay=0,
    )
    norms = []
    for step in range(STEPS):
        rows = batch(step)
        optimizer.zero_grad()
        mean_loss(hf, rows).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), OPTIMIZER.max_norm)))
        optimizer.step()
    return {"norms": norms, "weights": dict(hf.named_parameters())}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.verify), 2])
def test_window_result_is_independent_of_the_split_and_skips_nonfinite_steps(
    model: str, plain: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "results.pt"
    run_ranks(ranks, "tests.training.window_worker", model, str(out), *LAYOUTS, *POISONED)
    results = torch.load(out)
    for layout in LAYOUTS:
        assert results[layout]["norms"] == pytest.approx(plain["norms"], rel=1e-5), layout
        for name, weight in results[layout]["weights"].items():
            torch.testing.assert_close(
                weight.double(), plain["weights"][name], atol=1e-6, rtol=0, msg=f"{layout} {name}"
            )
        assert len(results[layout]["weights"]) == len(plain["weights"])
        assert results[layout]["skipped"] == 0
        # The model is in training mode, which enables dropout and gradient checkpointing.
        assert results[layout]["training"]
    check_poisoned(results)


def check_poisoned(results: dict[str, Any]) -> None:
    """Check that all ranks skipped step 0, whose loss was NaN on one rank, and applied step 1."""
    for layout in POISONED:
        result = results[layout]
        assert result["applied"] == [False, True], layout
        assert result["skipped"] == 1, layout
        assert not math.isfinite(result["norms"][0]) and math.isfinite(result["norms"][1]), layout
        assert all(weight.isfinite().all() for weight in result["weights"].values()), layout
