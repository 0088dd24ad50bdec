"""Tests that workers can compute on a GPU: no operation mixes its tensors with the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.config.algorithm import AdvantageConfig, AlgoConfig, KLConfig, LossConfig
from openrlhf.core.batches import Experience
from openrlhf.models.policy import LogitModel, PolicyModel
from openrlhf.models.scalar import load_scalar
from openrlhf.observability.metrics import values
from openrlhf.training.engine import Metrics
from openrlhf.workers.base import MicroBatchLimits, TrainedWorker
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker, clip_of, correction_of
from openrlhf.workers.steps import StepCutter, StepScorer
from tests.loading import load_spec
from tests.second_device import DEVICE, Elsewhere, SecondDevice, move
from tests.tiny import character_tokenizer, save_tiny_model
from tests.workers.policy_job import ACTOR, ALGO, KL_COEF, TEMPERATURE, batch, role_settings

LIMITS = MicroBatchLimits(size=8)
MASKED = AdvantageConfig(
    is_correction_gating="binary_kl", is_correction_level="seq", is_correction_mode="mask"
)
UNBIASED = KLConfig(estimator="k2", use_loss=True, unbiased_gradient=True)
# Flags of the policy's loss: the section of the actor, and the section of the algorithm.
CASES: dict[str, tuple[Any, AlgoConfig]] = {
    "ppo": (ACTOR, ALGO),
    "gspo": (replace(ACTOR, policy_loss_type="gspo"), ALGO),
    "cispo, masked": (replace(ACTOR, policy_loss_type="cispo"), replace(ALGO, advantage=MASKED)),
    "constant": (
        replace(ACTOR, dual_clip=3.0, entropy_coef=None),
        replace(ALGO, kl=UNBIASED, loss=LossConfig(aggregation="constant")),
    ),
    "sequence, experts": (
        replace(ACTOR, aux_loss_coef=0.1),
        replace(ALGO, loss=LossConfig(aggregation="sequence")),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of a dense model and of a mixture of experts."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_tiny_model(folder / kind, kind) for kind in ("qwen2-tied", "qwen3-moe")}


def worker_of(kind: type[TrainedWorker[Any]], model: Any, **fields: Any) -> Any:
    """Return a worker without an engine or a process group."""
    worker = kind.__new__(kind)
    vars(worker).update(fields, engine=model)
    return worker


def compare(
    model: nn.Module, experience: Experience, backward: Callable[[Experience], Metrics]
) -> None:
    """Raise AssertionError unless metrics and gradients are the same on both devices."""
    expected = values(backward(experience))
    gradients = {key: weight.grad for key, weight in model.named_parameters()}
    with SecondDevice():
        move(model)
        found = values(backward(experience.to(DEVICE)))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for key, weight in model.named_parameters():
        assert isinstance(weight.grad, Elsewhere)
        torch.testing.assert_close(weight.grad.held, gradients[key], msg=key)


def backward_of(worker: Any, job: Any, experience: Experience) -> Metrics:
    loss, metrics = worker.loss(experience, worker.counts(experience), job)
    loss.backward()
    return metrics


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_policy_loss_on_a_second_device_equals_the_loss_on_the_cpu(
    case: str, packing: bool, models: dict[str, str]
) -> None:
    actor, algo = CASES[case]
    load = load_spec(models["qwen3-moe" if actor.aux_loss_coef else "qwen2-tied"], packing=packing)
    model = PolicyModel.load(load, balancing=actor.aux_loss_coef > 0).train()
    if actor.aux_loss_coef:
        # The default kernel calls an operation that a CPU does not have for integers.
        model.hf.set_experts_implementation("eager")
    worker = worker_of(
        PolicyWorker,
        model,
        actor=actor,
        algo=algo,
        config=role_settings(load, LIMITS, actor, algo).config,
        temperature=TEMPERATURE,
        clip=clip_of(actor),
        correction=correction_of(algo.advantage),
        max_response_tokens=16,
    )
    experience = batch()
    assert experience.old_logprobs is not None
    experience = replace(experience, ref_logprobs=experience.old_logprobs - 0.1)
    job = PolicyUpdate(experience=experience, steps=[], kl_coef=KL_COEF)
    compare(model, experience, partial(backward_of, worker, job))


@pytest.mark.parametrize("packing", [True, False])
def test_critic_loss_on_a_second_device_equals_the_loss_on_the_cpu(
    packing: bool, models: dict[str, str]
) -> None:
    load = load_spec(models["qwen2-tied"], packing=packing)
    model = load_scalar(load, normalize=True)
    worker = worker_of(CriticWorker, model, config=role_settings(load, LIMITS).config)
    experience = batch()
    assert experience.advantages is not None
    experience = replace(
        experience, values=experience.advantages, returns=experience.advantages + 1
    )
    compare(model, experience, partial(backward_of, worker, None))


def test_step_rewards_on_a_second_device_equal_the_rewards_on_the_cpu(
    models: dict[str, str],
) -> None:
    model = LogitModel.load(load_spec(models["qwen2-tied"], packing=True)).requires_grad_(False)
    scorer: Any = SimpleNamespace(
        cutter=StepCutter(character_tokenizer(), "\n", 5),
        judgements=torch.tensor([7, 8]),
        model=model,
    )
    answers = batch().targets()
    expected = StepScorer.rewards(scorer, answers)
    with SecondDevice():
        move(model)
        found = StepScorer.rewards(scorer, answers.to(DEVICE))
    assert isinstance(found, Elsewhere)
    torch.testing.assert_close(found.held, expected)
