"""Tests that a loss can be computed on a GPU: no operation mixes its tensors with the CPU's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import Ragged, TokenRows
from openrlhf.observability.metrics import Mean, Metric, values
from openrlhf.trainers.supervised import SupervisedTrainer
from openrlhf.trainers.tasks import OfflineTask
from tests.second_device import DEVICE, Elsewhere, SecondDevice, move
from tests.tiny import save_tiny_model
from tests.trainers.offline_job import rows_of, task_of
from tests.trainers.test_logit_chunks import loaded

TASKS = [
    "sft",
    "dpo",
    "orpo",
    "kto",
    "kd",
    "kd_top",
    "prm_hard",
    "prm_soft",
    "prm_vocabulary",
    "rm",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model(folder / "policy", seed=1), save_tiny_model(folder / "other", seed=2)


def backward(task: OfflineTask[Any, Any, Any], model: nn.Module, micro: Ragged) -> dict[str, float]:
    """Compute the loss of a micro-batch and its gradients, and return the logged numbers."""
    with torch.no_grad():
        micro, numbers = task.before(model, micro)
    totals: Mapping[str, float] = {**task.counts(micro), **numbers}
    loss, metrics = task.loss(model, micro, totals)
    loss.backward()
    return values(metrics)


def test_an_operation_with_tensors_on_both_devices_raises_runtime_error() -> None:
    with SecondDevice(), pytest.raises(RuntimeError, match="on the CPU and on the second device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", TASKS)
def test_loss_and_gradients_on_a_second_device_equal_those_on_the_cpu(
    name: str, packing: bool, models: tuple[str, str]
) -> None:
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=packing, attn_implementation="sdpa")
    task, model, micro = loaded(name, models, ds)
    expected = backward(task, model, micro)
    gradients = {key: weight.grad for key, weight in model.named_parameters()}
    with SecondDevice():
        for teacher in task.frozen.values():
            move(teacher.module)
        found = backward(task, move(model), micro.to(DEVICE))
    assert found == pytest.approx(expected, rel=1e-5)
    for key, weight in model.named_parameters():
        assert isinstance(weight.grad, Elsewhere)
        torch.testing.assert_close(weight.grad.held, gradients[key], msg=key)


def test_evaluation_keeps_only_one_micro_batch_on_the_device(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=True, attn_implementation="sdpa")
    task = task_of("sft", *models, ds)
    waiting: list[type] = []

    def loss(micro: TokenRows, totals: Mapping[str, float]) -> tuple[None, dict[str, Metric]]:
        waiting.append(type(micro.tokens))
        return None, {"train/gpt_loss": Mean(1.0, 1.0)}

    trainer: Any = SupervisedTrainer.__new__(SupervisedTrainer)
    trainer.task = task
    trainer.train = task.config.train
    trainer.engine = SimpleNamespace(evaluating=nullcontext, module=None)
    trainer.strategy = SimpleNamespace(
        device=DEVICE, dp_rank=0, dp_size=1, gather=lambda value: [value]
    )
    trainer.eval_rows = [*rows_of("sft", 0), *rows_of("sft", 1)]
    trainer.step = 0
    monkeypatch.setattr(trainer, "_loss", loss, raising=False)
    with SecondDevice():
        trainer.measure()
    assert len(waiting) > 1
    assert Elsewhere not in waiting
