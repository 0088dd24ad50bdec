"""Tests that optimizer steps of the real worker do not depend on how the window is split.

All combinations of ranks, ZeRO stages, micro-batches, packing and objectives are compared with a
plain float64 loop over rows that uses all logits. The tests exclude the auxiliary loss of a mixture
of experts, which is the only loss term that may depend on the split.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf.config.algorithm import AdvantageConfig
from openrlhf.core.batches import Experience
from openrlhf.trainers.update_plan import plan_update
from tests.ranks import run_ranks
from tests.reference import policy as reference
from tests.tiny import save_tiny_model
from tests.workers.policy_job import (
    ACTOR,
    BATCH_SIZE,
    ENTROPY_COEF,
    KL_COEF,
    LENGTHS,
    MAX_RESPONSE,
    PTX_COEF,
)
from tests.workers.split_job import CLIPS, CORRECTIONS, OBJECTIVES, experience
from tests.workers.test_policy import scores, text_nll

STAGES = ("zero0", "zero1", "zero2", "zero3")
# tokens20 changes the row order, and its micro-batches have different numbers of rows
LIMITS = ("rows1", "rows3", "rows9", "tokens20")
SHAPES = ("packed", "padded")
MATRIX = [
    "-".join((*layout, *objective))
    for *layout, objective in product(STAGES, LIMITS, SHAPES, OBJECTIVES)
]
# Layouts that cover every stage, limit and shape, and every objective once.
SLICE = [
    "zero0-rows9-padded-ppo-token",
    "zero0-tokens20-packed-cispo-sequence",
    "zero1-rows1-packed-gspo-token",
    "zero1-rows3-padded-ppo-sequence",
    "zero2-rows3-packed-gspo-constant",
    "zero2-tokens20-padded-cispo-constant",
    "zero2-rows9-packed-ppo-constant",
    "zero3-rows1-padded-cispo-token",
    "zero3-tokens20-packed-gspo-sequence",
]
# Float32 tolerances against float64 after three steps: learning rate 1, gradients of about 0.1.
LOSS, NORM, WEIGHT = 1e-5, 1e-4, 5e-6  # absolute, relative, absolute
Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: str) -> dict[tuple[str, str], Outcome]:
    """Compute, row by row, the result of the update under each objective.

    Only the choice of each step's rows comes from our code.
    """
    return {objective: plain_update(model, *objective) for objective in OBJECTIVES}


def plain_update(model: str, loss: str, aggregation: str) -> Outcome:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    adam = ACTOR.adam
    optimizer = torch.optim.AdamW(
        hf.parameters(), lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=0
    )
    [plan] = plan_update(LENGTHS, slices=1, batch_size=BATCH_SIZE, epochs=1, seed=0)
    policy_sum, count, norm = 0.0, 0.0, math.nan
    for step in plan.steps:
        rows = [row_terms(hf, plan.rows[i], loss) for i in step]
        tokens = sum(len(terms) for terms, _ in rows)
        if aggregation == "token":
            policy, share = sum(terms.sum() for terms, _ in rows), tokens
        elif aggregation == "sequence":
            policy, share = sum(terms.mean() for terms, _ in rows), len(rows)
        else:
            policy, share = sum(terms.sum() / MAX_RESPONSE for terms, _ in rows), len(rows)
        optimizer.zero_grad()
        (
            policy / share + sum(extra for _, extra in rows) / tokens + PTX_COEF * text_nll(hf)
        ).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(hf.parameters(), ACTOR.max_norm))
        optimizer.step()
        policy_sum, count = policy_sum + torch.as_tensor(policy).item(), count + share
    return {"loss": policy_sum / count, "norm": norm, "weights": dict(hf.named_parameters())}


def row_terms(hf: PreTrainedModel, row: int, loss: str) -> tuple[Tensor, Tensor]:
    """Return the corrected policy loss of each sampled token in a row, and the sum of β·k3 − c·H.

    The formulas are taken from the papers.
    """
    one = experience().select([row])
    assert (
        one.advantages is not None and one.old_logprobs is not None and one.ref_logprobs is not None
    )
    assert one.rollout_logprobs is not None
    logprobs, entropies, mask = scores(hf, row)
    advantages, old, ref = (
        column.double()[mask] for column in (one.advantages, one.old_logprobs, one.ref_logprobs)
    )
    logprobs = logprobs[mask]
    low, high = 1 - CLIPS[loss], 1 + 1.5 * CLIPS[loss]
    if loss == "gspo":
        old = one.rollout_logprobs.double()[mask]
    ratio = (logprobs - old).exp()
    if loss == "gspo":
        ratio = ratio.prod() ** (1 / len(ratio))
    if loss == "cispo":
        terms = -ratio.detach().clamp(low, high) * advantages * logprobs
    else:
        terms = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    terms = terms * torch.tensor(trust(one, loss), dtype=torch.float64)[mask]
    k3 = (ref - logprobs).exp() - 1 - (ref - logprobs)
    return terms, (KL_COEF * k3 - ENTROPY_COEF * entropies[mask]).sum()


def trust(one: Experience, loss: str) -> list[float]:
    """Return the correction's weight for every token in a row; for GSPO, all weights are 1."""
    assert one.old_logprobs is not None and one.rollout_logprobs is not None
    mask = one.action_mask.tolist()
    if loss == "gspo":
        return [1.0] * len(mask)
    flags: AdvantageConfig = CORRECTIONS[loss]
    return reference.correction(
        one.old_logprobs.tolist(),
        one.rollout_logprobs.tolist(),
        mask,
        flags.is_correction_level,
        flags.is_correction_mode,
        *flags.is_correction_threshold,
        flags.is_correction_gating,
    )


@pytest.mark.parametrize("loss", CLIPS)
def test_float64_row_terms_equal_the_reference_loop(model: str, loss: str) -> None:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    one = experience().select([3])
    assert one.advantages is not None and one.old_logprobs is not None
    assert one.rollout_logprobs is not None
    with torch.no_grad():
        terms, _ = row_terms(hf, 3, loss)
        base = one.rollout_logprobs if loss == "gspo" else one.old_logprobs
    columns = (scores(hf, 3)[0], base, one.advantages, one.action_mask)
    expected = getattr(reference, loss)(
        *(column.tolist() for column in columns), CLIPS[loss], 1.5 * CLIPS[loss], None
    )
    mask = one.action_mask.tolist()
    assert terms.tolist() == pytest.approx(
        [x * w for x, w, acts in zip(expected, trust(one, loss), mask, strict=True) if acts]
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_weights_are_the_same_in_a_subset_of_the_layouts(
    model: str, plain: dict[tuple[str, str], Outcome], ranks: int, tmp_path: Path
) -> None:
    compare(model, plain, ranks, SLICE, tmp_path)


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_gives_the_same_loss_and_weights(
    model: str, plain: dict[tuple[str, str], Outcome], ranks: int, tmp_path: Path
) -> None:
    compare(model, plain, ranks, MATRIX, tmp_path)


def compare(
    model: str, plain: dict[tuple[str, str], Outcome], ranks: int, layouts: list[str], folder: Path
) -> None:
    run_ranks(
        ranks, "tests.workers.split_job", model, str(folder / "results.pt"), *layouts, timeout=3000
    )
    results = torch.load(folder / "results.pt")
    assert list(results) == layouts
    for layout, result in results.items():
        loss, aggregation = layout.split("-")[3:]
        expected, metrics = plain[loss, aggregation], result["metrics"]
        assert metrics["train/policy_loss"] == pytest.approx(expected["loss"], abs=LOSS), layout
        assert metrics["train/actor_grad_norm"] == pytest.approx(expected["norm"], rel=NORM), layout
        assert 0.1 < metrics["train/ppo_clip_ratio"] < 0.9, layout
        if loss == "gspo":
            assert "train/is_filter_ratio" not in metrics, layout
        else:
            assert 0.1 < metrics["train/is_filter_ratio"] < 0.9, layout
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in result["weights"].items():
            difference = (weight.double() - expected["weights"][name]).abs().max()
            assert difference < WEIGHT, f"{layout}: {name} differs by {difference:.1e}"


def test_weights_differ_between_objectives_by_far_more_than_the_tolerance(
    plain: dict[tuple[str, str], Outcome],
) -> None:
    """The comparisons above could not fail if all objectives led to the same weights."""
    weights = [outcome["weights"]["model.embed_tokens.weight"] for outcome in plain.values()]
    for i, first in enumerate(weights):
        for second in weights[i + 1 :]:
            assert (first - second).abs().max() > 100 * WEIGHT
