"""Nonfinite losses and gradients on the real engine: steps are skipped, counted and reported."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.workers.fault_job import BROKEN

STAGES = ("zero0", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module", params=[1, 2])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Run `fault_job` with every ZeRO stage, on one and on two ranks."""
    folder = tmp_path_factory.mktemp("faults")
    model = save_tiny_model(folder / "model")
    run_ranks(request.param, "tests.workers.fault_job", model, str(folder / "results.pt"), *STAGES)
    # With two ranks, rank 0 has rows 0, 2, … and rank 1 has rows 1, 3, …, in micro-batches of two.
    # Only row 7 has nonfinite values.
    where = {1: "micro-batch 5 of 5 on rank 0", 2: "micro-batch 2 of 2 on rank 1"}[request.param]
    return torch.load(folder / "results.pt") | {"where": where, "ranks": request.param}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(some[name], others[name]) for name in some
    )


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_loss_leaves_published_weights_unchanged(
    results: dict[str, Any], stage: str
) -> None:
    result = results[stage]
    assert equal(result["untouched"], result["start"])
    assert not math.isfinite(result["skipped"]["train/actor_grad_norm"])


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_loss_leaves_optimizer_state_unchanged(
    results: dict[str, Any], stage: str
) -> None:
    """The next step has the same result as in a policy that never had the broken step."""
    result = results[stage]
    assert equal(result["recovered"], result["healthy"])
    assert not equal(result["recovered"], result["start"])


@pytest.mark.parametrize("stage", STAGES)
def test_applied_step_resets_the_count_of_consecutive_skipped_steps(
    results: dict[str, Any], stage: str
) -> None:
    """`max_nonfinite` 2 allows the steps bad, good, bad; another bad step ends the run."""
    result = results[stage]
    assert result["counts"] == [1, 1]
    assert all(re.match(r"2 optimizer step.* actor", error) for error in result["loss errors"])
    assert equal(result["in the end"], result["recovered"])


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_loss_error_names_micro_batch_and_loss_term_on_every_rank(
    results: dict[str, Any], stage: str
) -> None:
    assert len(results[stage]["loss errors"]) == results["ranks"]
    for error in results[stage]["loss errors"]:
        assert results["where"] in error
        assert "'train/policy_loss': nan" in error


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_gradient_error_names_the_parameter_after_a_skipped_step(
    results: dict[str, Any], stage: str
) -> None:
    """Gradients are inspected only after a skipped step, so the first error names no parameter."""
    first, second = results[stage]["gradient errors"]
    assert len(first) == len(second) == results["ranks"]
    for error in first:
        assert "losses were finite, but some gradients were not" in error
        assert BROKEN not in error
    for error in second:
        assert f"losses were finite, but not the gradients of 1 parameter(s): {BROKEN}" in error


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_loss_error_names_the_critic(results: dict[str, Any], stage: str) -> None:
    for error in results[stage]["critic errors"]:
        assert re.match(r"1 optimizer step.* critic", error)
        assert results["where"] in error
        assert "'train/critic_loss': inf" in error
