"""Tests for the optimizer steps of the offline tasks.

A step's result does not depend on how its rows are split, and matches a plain float64 loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES
from openrlhf.config.supervised import DPOConfig
from openrlhf.models.adapters import add_adapters
from openrlhf.models.scalar import load_scalar
from tests.loading import load_spec
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.trainers.offline_job import (
    ADAPTERS,
    FLAGS,
    REWARD_TOKENS,
    ROWS,
    STEPS,
    answers,
    pairs,
    responses,
    solutions,
)

PLAIN = ["zero0-micro8-padded", "zero2-micro1-packed"]
SPLIT = ["zero0-micro3-packed", "zero1-micro3-padded", "zero2-micro8-packed", "zero3-micro3-packed"]
# The ranks have different numbers of logit chunks.
# ZeRO 3 must not gather the output layer's weight for every chunk.
# Otherwise, the rank with more chunks would wait forever.
UNEVEN = "zero3-micro3-packed-uneven"
LAYOUTS = [
    *(
        f"{name}-{layout}"
        for name in ("dpo", "kto", "kd", "prm_hard")
        for layout in [*PLAIN, *SPLIT]
    ),
    *(f"{name}-{UNEVEN}" for name in ("kd", "prm_hard")),
    *(
        f"{name}-{layout}"
        for name in (
            "rm",
            "hinge",
            "robust",
            "ipo",
            "simpo",
            "orpo",
            "kd_top",
            "prm_soft",
            "prm_vocabulary",
        )
        for layout in PLAIN
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Save a policy and a reference with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model(folder / "policy", seed=1), save_tiny_model(folder / "reference", seed=2)


def total(hf: Any, tokens: list[int], start: int) -> torch.Tensor:
    """Return Σ log π over the tokens from `start` on."""
    logprobs = torch.log_softmax(hf(torch.tensor([tokens])).logits[0], -1)
    return torch.stack(
        [logprobs[t - 1, tokens[t]] for t in range(max(1, start), len(tokens))]
    ).sum()


def pair_loss(name: str, hf: Any, reference: Any, step: int) -> torch.Tensor:
    losses = []
    for row in pairs(step):
        start, sides = row.prompt_length, (row.chosen, row.rejected)
        ours = [total(hf, tokens, start) for tokens in sides]
        with torch.no_grad():
            theirs = [total(reference, tokens, start) for tokens in sides]
        n, m = (len(tokens) - start for tokens in sides)
        h = (ours[0] - ours[1]) - (theirs[0] - theirs[1])
        means = ours[0] / n, ours[1] / m
        odds = [mean - torch.log1p(-mean.exp()) for mean in means]
        losses.append(
            {
                "dpo": -0.9 * torch.log(torch.sigmoid(0.1 * h))
                - 0.1 * torch.log(torch.sigmoid(-0.1 * h)),
                "robust": (
                    -0.9 * torch.log(torch.sigmoid(0.1 * h))
                    + 0.1 * torch.log(torch.sigmoid(-0.1 * h))
                )
                / 0.8,
                "hinge": torch.relu(1 - 0.1 * h),
                "ipo": (h - 5) ** 2,
                "simpo": -torch.log(torch.sigmoid(0.1 * (means[0] - means[1]) - 0.5)),
                "orpo": -means[0] - 0.1 * torch.log(torch.sigmoid(odds[0] - odds[1])),
            }[name]
            - 0.2 * means[0]
        )
    return torch.stack(losses).mean()


def kto_loss(hf: Any, reference: Any, step: int) -> torch.Tensor:
    rows = answers(step)
    starts = [row.loss_mask.index(True) for row in rows]
    mixed = [
        rows[i].tokens[: starts[i]] + rows[(i + 1) % ROWS].tokens[starts[(i + 1) % ROWS] :]
        for i in range(ROWS)
    ]
    with torch.no_grad():
        apart = [
            total(hf, m, s) - total(reference, m, s) for m, s in zip(mixed, starts, strict=True)
        ]
        kl = max(float(torch.stack(apart).mean()), 0.0)
        theirs = [total(reference, row.tokens, s) for row, s in zip(rows, starts, strict=True)]
    losses = []
    for row, start, base in zip(rows, starts, theirs, strict=True):
        ratio = total(hf, row.tokens, start) - base
        value = (
            torch.sigmoid(0.5 * (ratio - kl))
            if row.desirable
            else torch.sigmoid(0.5 * (kl - ratio))
        )
        losses.append((1.0 if row.desirable else 1.5) * (1 - value))
    return torch.stack(losses).mean()


def kd_loss(hf: Any, teacher: Any, step: int, top: int | None) -> torch.Tensor:
    terms = []
    for row in responses(step):
        tokens = torch.tensor([row.tokens])
        ours = torch.log_softmax(hf(tokens).logits[0], -1)
        with torch.no_grad():
            theirs = teacher(tokens).logits[0]
        for t in (t for t, target in enumerate(row.loss_mask) if target):
            kept = theirs[t - 1].topk(top).indices if top else torch.arange(len(theirs[t - 1]))
            soft = -(torch.softmax(theirs[t - 1][kept], -1) * ours[t - 1][kept]).sum()
            terms.append(-0.6 * ours[t - 1, row.tokens[t]] + 0.4 * soft)
    return torch.stack(terms).mean()


def prm_loss(hf: Any, step: int, kind: str) -> torch.Tensor:
    right, wrong = REWARD_TOKENS
    terms = []
    for row in solutions(step, kind):
        logits = hf(torch.tensor([row.tokens])).logits[0]
        for place, label in zip(row.places, row.labels, strict=True):
            if kind == "vocabulary":
                terms.append(-torch.log_softmax(logits[place], -1)[int(label)])
                continue
            logprobs = torch.log_softmax(logits[place][[right, wrong]], -1)
            share = label if kind == "soft" else float(label == right)
            terms.append(-share * logprobs[0] - (1 - share) * logprobs[1])
    return torch.stack(terms).mean()


def rm_loss(hf: Any, step: int) -> torch.Tensor:
    losses = []
    for row in pairs(step):
        chosen, rejected = (
            hf(torch.tensor([tokens])).logits[0, 0] for tokens in (row.chosen, row.rejected)
        )
        losses.append(torch.log(1 + torch.exp(rejected - chosen)))
    return torch.stack(losses).mean()


def loss_of(name: str, hf: Any, other: Any, step: int) -> torch.Tensor:
    kind, _, choice = name.partition("_")
    match kind:
        case "kto":
            return kto_loss(hf, other, step)
        case "kd":
            return kd_loss(hf, other, step, 5 if choice == "top" else None)
        case "prm":
            return prm_loss(hf, step, choice)
        case "rm":
            return rm_loss(hf, step)
        case _:
            return pair_loss(name, hf, other, step)


@pytest.fixture(scope="module")
def expected(models: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Return gradient norms and weights from plain float64 loops, one text at a time."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(layout.split("-")[0] for layout in LAYOUTS):
        hf, reference = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in models
        )
        if name == "rm":  # the new head depends only on the seed
            hf = load_scalar(load_spec(models[0]), seed=DPOConfig().train.seed).hf.double()
        optimizer = torch.optim.AdamW(
            hf.parameters(),
            lr=FLAGS["adam.lr"],
            betas=(0.9, 0.95),
            eps=FLAGS["adam.eps"],
            weight_decay=0,
        )
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(name, hf, reference, step).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), FLAGS["max_norm"])))
            optimizer.step()
        found[name] = {"norms": norms, "weights": dict(hf.named_parameters())}
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.verify), 2])
def test_update_does_not_depend_on_how_the_window_is_split(
    models: tuple[str, str], expected: dict[str, dict[str, Any]], ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "results.pt"
    run_ranks(ranks, "tests.trainers.offline_job", *models, str(out), *LAYOUTS)
    results = torch.load(out)
    for layout in LAYOUTS:
        name, result = layout.split("-")[0], results[layout]
        first = results[f"{name}-{PLAIN[0]}"]
        assert result["norms"] == pytest.approx(expected[name]["norms"], rel=1e-4), layout
        for parameter, weight in result["weights"].items():
            torch.testing.assert_close(
                weight.double(),
                expected[name]["weights"][parameter],
                atol=1e-5,
                rtol=0,
                msg=f"{layout} {parameter}",
            )
        for step in range(STEPS):
            assert result["metrics"][step] == pytest.approx(
                first["metrics"][step], rel=1e-4, abs=1e-6
            ), layout


# ---- adapters: the reference is the policy without adapters

ADAPTED = [
    *(
        f"{name}-{layout}-lora"
        for name in ("sft", "dpo", "kto", "kd", "prm_hard", "rm")
        for layout in (PLAIN[0], "zero3-micro3-packed")
    ),
    *(f"dpo-{layout}-lora" for layout in ("zero1-micro3-padded", PLAIN[1])),
    *(f"dpo-{layout}-dora" for layout in PLAIN),
]


def sft_loss(hf: Any, step: int) -> torch.Tensor:
    rows = responses(step)
    summed = [total(hf, row.tokens, row.loss_mask.index(True)) for row in rows]
    return -torch.stack(summed).sum() / sum(sum(row.loss_mask) for row in rows)


@pytest.fixture(scope="module")
def expected_adapted(models: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Return gradient norms and merged weights from plain float64 loops with PEFT.

    The loops start with the same adapters as the trainers. Reward models are not included.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, kind in dict.fromkeys(
        (layout.split("-")[0], layout.split("-")[-1]) for layout in ADAPTED
    ):
        if name == "rm":
            continue
        hf, base, teacher = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
            for path in (models[0], *models)
        )
        add_adapters(hf, ADAPTERS[kind], path=models[0], seed=DPOConfig().train.seed)
        trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=FLAGS["adam.lr"], betas=(0.9, 0.95), eps=FLAGS["adam.eps"], weight_decay=0
        )
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            other = teacher if name == "kd" else base
            (sft_loss(hf, step) if name == "sft" else loss_of(name, hf, other, step)).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, FLAGS["max_norm"])))
            optimizer.step()
        weights = {}
        for module_name, layer in hf.named_modules():
            if hasattr(layer, "merge"):
                layer.merge()
                weights[f"{module_name}.weight"] = layer.base_layer.weight.detach()
        found[f"{name}-{kind}"] = {
            "norms": norms,
            "weights": weights,
            "base": dict(base.named_parameters()),
        }
    return found


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapter_update_does_not_depend_on_how_the_window_is_split(
    models: tuple[str, str], expected_adapted: dict[str, dict[str, Any]], ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "results.pt"
    run_ranks(ranks, "tests.trainers.offline_job", *models, str(out), *ADAPTED)
    results = torch.load(out)
    for layout in ADAPTED:
        name, *_, kind = layout.split("-")
        result, first = results[layout], results[f"{name}-{PLAIN[0]}-{kind}"]
        for parameter, weight in result["weights"].items():
            torch.testing.assert_close(weight, first["weights"][parameter], atol=1e-5, rtol=0)
        for step in range(STEPS):
            assert result["metrics"][step] == pytest.approx(
                first["metrics"][step], rel=1e-4, abs=1e-5
            ), layout
        assert result["norms"] == pytest.approx(first["norms"], rel=1e-4), layout
        if name == "dpo":  # before the first step, the policy equals its reference
            assert (
                result["metrics"][0]["train/chosen_reward"]
                == result["metrics"][0]["train/reject_reward"]
                == 0
            )
        if name == "rm":
            continue
        wanted = expected_adapted[f"{name}-{kind}"]
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4), layout
        for parameter, weight in result["weights"].items():
            right = wanted["weights"].get(parameter, wanted["base"][parameter])
            torch.testing.assert_close(
                weight.double(), right, atol=1e-5, rtol=0, msg=f"{layout} {parameter}"
            )


@pytest.mark.verify
def test_adapters_on_4_bit_weights_train_the_same_on_any_number_of_ranks(
    models: tuple[str, str], tmp_path: Path
) -> None:
    layouts = [
        f"{name}-{layout}-qlora"
        for name in ("sft", "dpo", "rm")
        for layout in ("zero2-micro3-packed", SPLIT[-1])
    ]
    found: list[dict[str, Any]] = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.pt"
        run_ranks(ranks, "tests.trainers.offline_job", *models, str(out), *layouts)
        found.append(torch.load(out))
    for layout in layouts:
        alone, split = (results[layout] for results in found)
        assert split["norms"] == pytest.approx(alone["norms"], rel=0.03), layout
        for parameter, weight in split["weights"].items():
            torch.testing.assert_close(
                weight, alone["weights"][parameter], atol=2e-3, rtol=2**-7, msg=parameter
            )


@pytest.mark.verify
def test_ranks_may_have_different_numbers_of_chunks_of_an_untied_or_adapted_output_layer(
    tmp_path: Path,
) -> None:
    """ZeRO-3 ranks with different numbers of chunks finish and match unsharded weights."""
    untied = [
        save_tiny_model(tmp_path / name, "qwen2-untied", seed=seed)
        for seed, name in enumerate(("policy", "teacher"))
    ]
    names = {
        "kd": "",
        "kd_top": "",
        "prm_vocabulary": "",
        "sft": "-head",
        "ipo": "-head",  # its reference is the policy without adapters
        "dpo": "-head_alone",  # the decoder has no gradient
    }
    layouts: list[str] = []
    for name, adapter in names.items():
        layouts += [f"{name}-zero0-micro8-padded{adapter}", f"{name}-{UNEVEN}{adapter}"]
    out = tmp_path / "results.pt"
    run_ranks(2, "tests.trainers.offline_job", *untied, str(out), *layouts, timeout=900)
    results = torch.load(out)
    for name, adapter in names.items():
        whole = results[f"{name}-zero0-micro8-padded{adapter}"]
        uneven = results[f"{name}-{UNEVEN}{adapter}"]
        assert uneven["norms"] == pytest.approx(whole["norms"], rel=1e-4), name
        for parameter, weight in uneven["weights"].items():
            torch.testing.assert_close(
                weight, whole["weights"][parameter], atol=1e-5, rtol=0, msg=f"{name} {parameter}"
            )


def test_registered_preference_losses_match_the_flags_choices() -> None:
    from openrlhf.config import choices

    assert list(PREFERENCE_LOSSES) == list(choices.PREFERENCE_LOSSES)
