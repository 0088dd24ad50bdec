"""Policy and reference workers in every layout, compared with a plain float64 loop over logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from openrlhf.trainers.update_plan import plan_update
from tests.ranks import run_ranks
from tests.reference import policy as reference
from tests.tiny import save_tiny_model
from tests.workers.policy_job import (
    ACTOR,
    BAND,
    BATCH_SIZE,
    CLIP,
    ENTROPY_COEF,
    KL_COEF,
    LENGTHS,
    PTX_COEF,
    TEMPERATURE,
    TEXTS,
    batch,
)

LAYOUTS = [
    "zero0-rows3-padded",
    "zero2-rows2-packed",
    "zero2-tokens20-packed",
    "zero3-rows3-padded",
]
Row = tuple[Tensor, Tensor, Tensor]  # log π, entropies and mask of one row, in float64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[1, 2])
def results(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Run `policy_job` in every layout, on one and on two ranks."""
    out = tmp_path_factory.mktemp("out")
    run_ranks(request.param, "tests.workers.policy_job", model, str(out), *LAYOUTS)
    loaded = torch.load(out / "results.pt")
    return {layout: loaded[layout] | {"folder": out / layout} for layout in LAYOUTS}


def scores(hf: PreTrainedModel, row: int) -> Row:
    experience = batch().select([row])
    logits = hf(experience.tokens[None]).logits[0] / TEMPERATURE
    table = torch.log_softmax(logits[:-1], -1)
    logprobs = table.gather(1, experience.tokens[1:, None])[:, 0]
    entropies = -(table.exp() * table).sum(1)
    blank = torch.zeros(1, dtype=torch.float64)
    return torch.cat([blank, logprobs]), torch.cat([blank, entropies]), experience.action_mask


@pytest.fixture(scope="module")
def plain(model: str) -> dict[str, Any]:
    """Compute scores, then take three optimizer steps, one row at a time.

    Only the assignment of rows to steps comes from our code.
    """
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        hf.parameters(),
        lr=ACTOR.adam.lr,
        betas=ACTOR.adam.betas,
        eps=ACTOR.adam.eps,
        weight_decay=0,
    )
    with torch.no_grad():
        before = [scores(hf, row)[0] for row in range(len(LENGTHS))]
    [plan] = plan_update(LENGTHS, slices=1, batch_size=BATCH_SIZE, epochs=1, seed=0)
    sums = dict.fromkeys(("policy", "kl", "entropy", "clipped", "tokens"), 0.0)
    norm, texts = math.nan, list[float]()
    for rows in plan.steps:
        terms = [step_terms(hf, plan.rows[row], before[plan.rows[row]]) for row in rows]
        policy, kl, entropy, tokens, clipped = (sum(term[i] for term in terms) for i in range(5))
        optimizer.zero_grad()
        text = text_nll(hf)
        ((policy + KL_COEF * kl - ENTROPY_COEF * entropy) / tokens + PTX_COEF * text).backward()
        texts.append(text.item())
        norm = float(torch.nn.utils.clip_grad_norm_(hf.parameters(), ACTOR.max_norm))
        optimizer.step()
        for name, value in zip(sums, (policy, kl, entropy, clipped, tokens), strict=True):
            sums[name] += torch.as_tensor(value).item()
    tokens = sums.pop("tokens")
    return {
        "before": torch.cat(before),
        "means": {name: value / tokens for name, value in sums.items()}
        | {"text": math.fsum(texts) / len(texts)},
        "norm": norm,
        "weights": dict(hf.named_parameters()),
    }


def step_terms(hf: PreTrainedModel, row: int, ref: Tensor) -> tuple[Any, ...]:
    """Return sums over a row's sampled tokens: surrogate, KL, entropy, count, and clipped count."""
    logprobs, entropies, mask = scores(hf, row)
    one = batch().select([row])
    assert one.advantages is not None and one.old_logprobs is not None
    advantages, ratio = one.advantages.double(), (logprobs - one.old_logprobs.double()).exp()
    free, held = ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    trust = (one.old_logprobs.double() - one.rollout_logprobs.double()).exp().clamp(*BAND)
    log_ratio = logprobs - ref
    kl = (-log_ratio).exp() - 1 + log_ratio
    return (
        -(trust * torch.minimum(free, held))[mask].sum(),
        kl[mask].sum(),
        entropies[mask].sum(),
        float(mask.sum()),
        float((held < free)[mask].sum()),
    )


def text_nll(hf: PreTrainedModel) -> Tensor:
    """Return the mean negative log-likelihood of the pretraining text at temperature 1."""
    tables = [torch.log_softmax(hf(torch.tensor([row])).logits[0, :-1], -1) for row in TEXTS]
    chosen = [
        table.gather(1, torch.tensor(row[1:])[:, None])
        for table, row in zip(tables, TEXTS, strict=True)
    ]
    return -torch.cat(chosen).mean()


def test_float64_policy_terms_equal_the_papers_reference_loop(model: str) -> None:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logprobs, _, mask = scores(hf, 3)
        surrogate = step_terms(hf, 3, logprobs)[0]
    one = batch().select([3])
    assert one.advantages is not None and one.old_logprobs is not None
    columns = (logprobs, one.old_logprobs, one.advantages, mask)
    terms = reference.ppo(*(column.tolist() for column in columns), CLIP, CLIP, None)
    sampled = one.old_logprobs.tolist(), one.rollout_logprobs.tolist(), mask.tolist()
    trust = reference.correction(*sampled, "token", "clip", *BAND)
    assert float(surrogate) == pytest.approx(
        math.fsum(t * w for t, w in zip(terms, trust, strict=True))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_plain_transformers_in_every_layout(
    results: dict[str, Any], plain: dict[str, Any], layout: str
) -> None:
    sampled = batch().action_mask
    for name in ("before", "reference"):
        scored = results[layout][name].double()
        torch.testing.assert_close(scored[sampled], plain["before"][sampled], atol=2e-6, rtol=0)
        assert not scored[~sampled].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_does_not_depend_on_ranks_stage_micro_batches_or_packing(
    results: dict[str, Any], plain: dict[str, Any], layout: str
) -> None:
    metrics, means = results[layout]["metrics"], plain["means"]
    assert metrics["train/policy_loss"] == pytest.approx(means["policy"], abs=1e-5)
    assert metrics["train/kl"] == pytest.approx(means["kl"], abs=1e-5)
    assert metrics["train/entropy_loss"] == pytest.approx(means["entropy"], abs=1e-5)
    assert metrics["train/ptx_loss"] == pytest.approx(means["text"], abs=1e-5)
    assert metrics["train/ppo_clip_ratio"] == pytest.approx(means["clipped"])
    assert 0.2 < means["clipped"] < 0.8
    assert metrics["train/actor_grad_norm"] == pytest.approx(plain["norm"], rel=1e-4)
    weights = results[layout]["weights"]
    assert weights.keys() == plain["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight.double(), plain["weights"][name], atol=5e-6, rtol=0, msg=name
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_changes_the_policy_but_not_the_reference(
    results: dict[str, Any], layout: str
) -> None:
    result = results[layout]
    assert torch.equal(result["reference"], result["reference after"])
    assert (result["after"] - result["before"]).abs().max() > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mismatch_metrics_compare_the_engine_with_the_old_policy(
    results: dict[str, Any], layout: str
) -> None:
    experience = batch()
    assert experience.old_logprobs is not None
    gap = (experience.old_logprobs - experience.rollout_logprobs)[experience.action_mask]
    metrics = results[layout]["metrics"]
    assert metrics["train/logprob_gap_mean"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert metrics["train/logprob_gap_max"] == pytest.approx(float(gap.abs().max()), rel=1e-5)
    assert metrics["train/vllm_kl"] == pytest.approx(-float(gap.mean()), rel=1e-5)
    assert metrics["train/rollout_ratio"] == pytest.approx(float(gap.exp().mean()), rel=1e-5)
    outside = (gap.exp() < BAND[0]) | (gap.exp() > BAND[1])
    assert metrics["train/is_filter_ratio"] == pytest.approx(float(outside.float().mean()))
    assert 0.2 < metrics["train/is_filter_ratio"] < 0.9
    unusual = (gap.exp() < 0.5) | (gap.exp() > 5)
    assert metrics["train/rollout_ratio_outside"] == pytest.approx(float(unusual.float().mean()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_loads_in_plain_transformers_with_the_trained_weights(
    results: dict[str, Any], layout: str
) -> None:
    folder: Path = results[layout]["folder"]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in hf.named_parameters():
        assert torch.equal(parameter, results[layout]["weights"][name]), name
    assert AutoTokenizer.from_pretrained(folder)("1+2").input_ids == [5, 40, 6]
