"""Tests that compute every number that docs/conventions.md states about our formulas.

The page contains no other numbers.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import cast

import pytest
import torch

from openrlhf.algorithms import kl as kl_module
from openrlhf.algorithms import tensors
from openrlhf.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    GROUP_STD_EPSILON,
    gae,
    shape_rewards,
)
from openrlhf.algorithms.corrections import Correction, Level, Mode, correction_weights
from openrlhf.algorithms.kl import KLController, kl_estimate
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, Clip, aggregation_weights, value_loss
from openrlhf.algorithms.preference_losses import Judged, Strength, ipo, kto, orpo, simpo
from openrlhf.algorithms.rewards import overlong_penalty, token_rewards
from openrlhf.algorithms.supervised_losses import soft_cross_entropy
from openrlhf.algorithms.tensors import linear_logprobs, masked_whiten
from openrlhf.config.algorithm import AdvantageConfig
from openrlhf.config.choices import CORRECTIONS
from openrlhf.config.choices import POLICY_LOSSES as POLICY_LOSS_FLAGS
from openrlhf.config.legacy_values import LEVELS
from tests.algorithms.test_kl import exact_kl_gradient
from tests.sources import ROOT

ROWS = {
    cells[0]: cells
    for line in (ROOT / "docs/conventions.md").read_text().splitlines()
    if line.startswith("| ")
    and len(cells := line.strip("| ").split(" | ")) == 4
    and cells[0] != "formula"
}
PROOFS: dict[str, Callable[[], list[str]]] = {}


def proves(name: str) -> Callable[[Callable[[], list[str]]], Callable[[], list[str]]]:
    """Register a function that computes the sentences for a row of the page's table."""

    def register(proof: Callable[[], list[str]]) -> Callable[[], list[str]]:
        PROOFS[name] = proof
        return proof

    return register


def numbers(values: torch.Tensor | list[float]) -> str:
    """Format numbers as on the page; a value that rounds to zero has no minus sign."""
    return ", ".join(
        f"{value + 0.0:.3f}".replace("-0.000", "0.000")
        for value in torch.as_tensor(values).tolist()
    )


def shaped(name: str, rewards: list[float]) -> torch.Tensor:
    group = torch.zeros(len(rewards), dtype=torch.long)
    return shape_rewards(torch.tensor(rewards), group, ADVANTAGE_ESTIMATORS[name])


def weights(preset: str, omegas: list[float], band: tuple[float, float]) -> str:
    old_level, old_mode = CORRECTIONS[preset]
    level, mode = cast(tuple[Level, Mode], (LEVELS[old_level], old_mode))
    old = torch.tensor([omegas]).log()
    correction = Correction(gating="ratio", level=level, mode=mode, low=band[0], high=band[1])
    return numbers(
        correction_weights(old, torch.zeros_like(old), torch.ones_like(old) > 0, correction)[0][0]
    )


@proves("GRPO's divisor")
def group_norm() -> list[str]:
    assert not shaped("group_norm", [0.1] * 8).any()
    return [
        f"The unbiased standard deviation + {GROUP_STD_EPSILON:g}",
        f"rewards 1, 0, 0 become {numbers(shaped('group_norm', [1.0, 0.0, 0.0]))}",
        "Eight rewards of 0.1 all become exactly 0",
    ]


@proves("RLOO with a KL in the reward")
def rloo() -> list[str]:
    kl, mask = torch.tensor([[0.2, 0.3], [0.05, 0.05]]), torch.ones(2, 2, dtype=torch.bool)
    first = token_rewards(shaped("rloo", [1.0, 0.0]), kl, mask, 1.0).sum(1)[:1]
    return [
        (
            "With β = 1, rewards 1 and 0, and KLs that sum to 0.5 and 0.1, the first sample's "
            f"tokens sum to {numbers(first)}"
        )
    ]


@proves("GAE across gaps")
def gae_across_gaps() -> list[str]:
    mask, row = torch.tensor([[True, False, False, True]]), torch.tensor([[0.0, 0.0, 0.0, 4.0]])
    advantages, _ = gae(row, row, mask, gamma=0.5, lam=1.0)
    return [
        "γ = 0.5 and λ = 1, an action with value 0 is followed by two tool tokens and by an action "
        "with value 4 and reward 4.",
        f"The first advantage is {advantages[0, 0].item()}",
    ]


@proves("Whitened advantages")
def whitening() -> list[str]:
    all_four = torch.ones(4, dtype=torch.bool)
    assert not masked_whiten(torch.full((4,), 0.1), all_four).any()
    return [
        f"population variance, at least {tensors.MIN_VARIANCE:g}",
        f"1, 2, 3, 6 become {numbers(masked_whiten(torch.tensor([1.0, 2.0, 3.0, 6.0]), all_four))}",
        "Equal values become exactly 0",
    ]


@proves("k3")
def k3() -> list[str]:
    x = torch.tensor([-2.6, -2.7], requires_grad=True)
    estimates = kl_estimate(x, torch.zeros(2), "k3")
    estimates.sum().backward()
    assert x.grad is not None and x.grad[0] and not x.grad[1]
    free, held = (numbers([value]) for value in estimates.tolist())
    return [
        f"clamped to ±{tensors.LOG_RATIO_BOUND:g} nats, "
        f"then the estimate to ±{kl_module.KL_BOUND:g}",
        f"x = -2.6 gives {free}; x = -2.7 gives {held} and no gradient",
    ]


@proves("k3 as a loss")
def k3_as_a_loss() -> list[str]:
    of_samples, of_forward_kl = exact_kl_gradient("k3", forward=True)
    assert torch.allclose(of_samples, of_forward_kl)
    assert torch.allclose(*exact_kl_gradient("k2"))
    assert not torch.allclose(*exact_kl_gradient("k3"))
    assert exact_kl_gradient("k1")[0].abs().max() < 1e-12
    return [
        (
            "the gradient of KL(π_ref‖π); k2 has the gradient of KL(π‖π_ref), "
            "and k1's expected gradient is 0"
        )
    ]


@proves("Adaptive β")
def adaptive() -> list[str]:
    controller = KLController(0.1, target=6.0, horizon=100)
    controller.update(0.0, 1000)
    return [
        "The quotient samples ÷ horizon is capped at 1",
        (
            "a KL of 0 over 1000 samples with horizon 100 takes β from 0.1 to "
            f"{numbers([controller.coef])}"
        ),
    ]


@proves("DAPO's overlong penalty")
def overlong() -> list[str]:
    penalty = overlong_penalty(torch.tensor([90]), max_length=100, buffer=20.0, factor=1.0)
    return [
        f"With a maximum of 100, a buffer of 20 and factor 1, 90 tokens cost {numbers(penalty)}"
    ]


@proves("CISPO's caps")
def cispo() -> list[str]:
    clip = POLICY_LOSS_FLAGS["cispo"].clip
    assert clip is not None
    ratios = torch.tensor([[0.01, 9.0]])
    logprobs, ones = ratios.log().requires_grad_(), torch.ones(1, 2)
    loss = POLICY_LOSSES["cispo"](
        logprobs, torch.zeros(1, 2), ones, ones > 0, Clip(low=clip[0], high=clip[1])
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logprobs)
    low, high = (numbers([-value]) for value in gradient[0].tolist())
    return [
        f"[1 - ε_low, 1 + ε_high], where ε is {clip[0]:g} and {clip[1]:g} by default",
        f"for ρ of 0.01 and 9 the weights are {low} and {high}",
    ]


@proves("The value loss")
def values() -> list[str]:
    v, old, returns = (torch.tensor([[x]]) for x in (2.0, 1.0, 2.0))
    loss = value_loss(v, old, returns, torch.tensor([[True]]), clip=0.5)
    return [f"V = 2, V_old = 1, a return of 2 and clip 0.5 give a loss of {numbers(loss[0])}"]


@proves("The mean over tokens or sequences")
def aggregation() -> list[str]:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    terms = torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    means = {}
    for kind in ("token", "sequence", "constant"):
        shares, count = aggregation_weights(mask, kind, max_tokens=4)
        means[kind] = numbers([float((shares * terms).sum()) / count])
    return [
        "Example: a row of 1 token with loss 4 and a row of 3 tokens with loss 0 have the mean "
        f"{means['token']} with `token`, {means['sequence']} with `sequence`, and "
        f"{means['constant']} with `constant` and L = 4"
    ]


@proves("TIS")
def tis() -> list[str]:
    band = AdvantageConfig().is_correction_threshold
    return [
        (
            f"{band[0]} to {band[1]} by default: ω of 0.4, 1, 9 become "
            f"{weights('tis', [0.4, 1, 9], band)}"
        ),
        (
            "With the threshold 0 to 2, the authors' own form, they become "
            f"{weights('tis', [0.4, 1, 9], (0.0, 2.0))}"
        ),
    ]


@proves("Sequence-level masking")
def sequence_masking() -> list[str]:
    band = AdvantageConfig().is_correction_threshold
    high, low = (
        numbers([math.prod([6, 1, 27]) ** (1 / 3)]),
        numbers([math.prod([0.1, 0.5, 1]) ** (1 / 3)]),
    )
    for omegas in ([6, 1, 27], [0.1, 0.5, 1]):
        assert weights("seq-mask-tis", omegas, band) == "0.000, 0.000, 0.000"
    return [
        f"{band[0]} or {band[1]} by default",
        f"ω of 6, 1, 27 have the mean {high} and ω of 0.1, 0.5, 1 have {low}, so both rows get "
        "weight 0",
        f"0.4, 1, 9 keep the weights {weights('seq-mask-tis', [0.4, 1, 9], band)}",
    ]


@proves("Temperature")
def temperature() -> list[str]:
    states, identity = torch.tensor([[0.0, math.log(3)]] * 2), torch.eye(2)
    logprobs, entropy = linear_logprobs(
        states, identity, torch.tensor([0, 1]), temperature=0.5, entropy=True
    )
    assert entropy is not None
    low, high = (f"{p:.1f}" for p in logprobs.exp().tolist())
    return [
        "logits 0 and log 3 at temperature 0.5 have "
        f"probabilities {low} and {high} and an entropy of {numbers(entropy[:1])} nats"
    ]


def pair(logprobs: tuple[float, float], lengths: tuple[int, int] = (1, 1)) -> Judged:
    """Return a pair with the given Σ log π under the policy, and sums of 0 under the reference."""
    policy, tokens = torch.tensor([logprobs]), torch.tensor([lengths], dtype=torch.float32)
    return Judged(policy=policy, reference=torch.zeros_like(policy), tokens=tokens)


@proves("IPO")
def ipo_of_sums() -> list[str]:
    return [
        f"h = 3 and β = 0.1 give {numbers(ipo(pair((-1.0, -4.0), (2, 4)), Strength(beta=0.1)))}"
    ]


@proves("SimPO's margin")
def simpo_margin() -> list[str]:
    cost = numbers(simpo(pair((-1.0, -4.0), (2, 4)), Strength(beta=2.0, target=0.5)))
    return [f"answers of 2 and 4 tokens with log π of -1 and -4, β = 2 and γ = 0.5 give {cost}"]


@proves("ORPO's NLL")
def orpo_nll() -> list[str]:
    cost = numbers(orpo(pair((-1.0, -4.0), (2, 4)), Strength(beta=0.1)))
    return [f"answers of 2 and 4 tokens with log π of -1 and -4 and β = 0.1 give {cost}"]


@proves("KTO's KL")
def kto_kl() -> list[str]:
    ratios, labels = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    good, bad = kto(ratios, labels, 0.4, beta=0.5, desirable_weight=1.0, undesirable_weight=1.0)
    told = (
        f"a desirable answer costs {numbers(good[None])}, an undesirable one {numbers(bad[None])}"
    )
    return [f"with r = 1, a KL of 0.4 and β = 0.5, {told}"]


@proves("Distillation's mean")
def distillation() -> list[str]:
    teacher = torch.tensor([[0.9, 0.1]]).log()
    student, own = (
        numbers(soft_cross_entropy(logits, teacher)) for logits in (torch.zeros(1, 2), teacher)
    )
    return [
        f"probabilities 0.5 and 0.5 with a teacher's 0.9 and 0.1 give a loss of {student}; "
        f"the minimum is the teacher's own entropy, {own}"
    ]


def test_every_row_of_the_page_has_a_check() -> None:
    assert list(PROOFS) == list(ROWS)


@pytest.mark.parametrize("name", PROOFS)
def test_numbers_in_a_row_match_what_the_code_computes(name: str) -> None:
    here, sentences = ROWS[name][1], PROOFS[name]()
    assert [sentence for sentence in sentences if sentence not in here] == []
    for sentence in sentences:
        here = here.replace(sentence, "")
    assert re.findall(r"(?<![a-z])\d[\d.]*", here) == [], "a number that is not computed here"


@pytest.mark.parametrize("name", ROWS)
def test_function_named_in_a_row_exists(name: str) -> None:
    module, function = ROWS[name][3].strip("`").split(".")
    assert callable(getattr(importlib.import_module(f"openrlhf.algorithms.{module}"), function))


def test_numbers_for_alternative_formulas_are_correct() -> None:
    """Check the numbers that follow from a row's example."""
    assert "0.6" in ROWS["RLOO with a KL in the reward"][2] and pytest.approx(0.6) == (1 - 0.5) - (
        0 - 0.1
    )
    assert "0.5" in ROWS["GAE across gaps"][2] and 0.5**3 * 4 == 0.5
    assert "-0.100" in ROWS["Adaptive β"][2] and pytest.approx(-0.1) == 0.1 * (1 - 0.2 * 1000 / 100)
    assert "0.562" in ROWS["Temperature"][2]
    assert -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) == pytest.approx(0.562, abs=1e-3)
