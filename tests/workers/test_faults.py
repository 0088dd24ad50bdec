"""Losses and gradients that are not finite, on the true engine: never a step, always counted, and
in the end named.
"""

from __future__ import annotations

import math
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
    """What happened under every stage, with one and with two ranks."""
    folder = tmp_path_factory.mktemp("faults")
    model = save_tiny_model(folder / "model")
    run_ranks(request.param, "tests.workers.fault_job", model, str(folder / "results.pt"), *STAGES)
    # Rows 0, 2, … are rank 0's and rows 1, 3, … rank 1's, in micro-batches of two; row 7 is
    # poisoned.
    where = {1: "micro-batch 5 of 5 on rank 0", 2: "micro-batch 2 of 2 on rank 1"}[request.param]
    return torch.load(folder / "results.pt") | {"where": where, "ranks": request.param}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(some[name], others[name]) for name in some
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_a_loss_that_is_not_finite_leaves_what_is_published_untouched(
    results: dict[str, Any], stage: str
) -> None:
    result = results[stage]
    assert equal(result["untouched"], result["start"])
    assert not math.isfinite(result["skipped"]["train/actor_grad_norm"])


@pytest.mark.parametrize("stage", STAGES)
def test_it_leaves_the_optimizer_untouched_too(results: dict[str, Any], stage: str) -> None:
    """The next step is the one that a policy takes which never met the broken one."""
    result = results[stage]
    assert equal(result["recovered"], result["healthy"])
    assert not equal(result["recovered"], result["start"])


@pytest.mark.parametrize("stage", STAGES)
def test_skipped_steps_are_counted_and_a_good_one_ends_the_row(
    results: dict[str, Any], stage: str
) -> None:
    """With `max_nonfinite` 2: bad, good, bad is no reason to stop; another bad one is."""
    result = results[stage]
    assert result["counts"] == [1, 1]
    assert all(
        error.startswith("2 optimizer step(s) of the actor in a row")
        for error in result["loss errors"]
    )
    assert equal(result["in the end"], result["recovered"])


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_names_the_micro_batch_and_the_term_of_the_loss(
    results: dict[str, Any], stage: str
) -> None:
    culprit = f"the loss of {results['where']} was nan (train/policy_loss = nan)"
    assert len(results[stage]["loss errors"]) == results["ranks"]
    assert all(culprit in error for error in results[stage]["loss errors"])


@pytest.mark.parametrize("stage", STAGES)
def test_where_every_loss_was_finite_the_parameter_is_named(
    results: dict[str, Any], stage: str
) -> None:
    """Gradients are looked at after a skipped step: where the first one ends the run, nothing more
    is known.
    """
    first, second = results[stage]["gradient errors"]
    assert len(first) == len(second) == results["ranks"]
    assert all("every loss was finite, but not the gradients. Lower" in error for error in first)
    culprit = f"every loss was finite, but not the gradient of {BROKEN} (1 parameter(s) in all)"
    assert all(culprit in error for error in second)


@pytest.mark.parametrize("stage", STAGES)
def test_a_critic_is_told_from_an_actor(results: dict[str, Any], stage: str) -> None:
    culprit = f"the loss of {results['where']} was inf (train/critic_loss = inf)"
    for error in results[stage]["critic errors"]:
        assert error.startswith("1 optimizer step(s) of the critic in a row")
        assert culprit in error
