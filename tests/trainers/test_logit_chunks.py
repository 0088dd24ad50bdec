"""Tests that offline losses hold only one chunk of the student's or teacher's logits at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.algorithms import tensors
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.observability.metrics import values
from openrlhf.trainers.tasks import OfflineTask
from tests.allocations import LargestTensor
from tests.tiny import SIZES, save_tiny_model
from tests.trainers.offline_job import rows_of, task_of

VOCABULARY = 2048
SOME_ROWS = 4  # rows of logits per chunk


class Frozen:
    """A frozen model without a process group."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.requires_grad_(False).eval()

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def rest(self) -> None:
        """Do nothing: the model has only one device."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return (
        save_tiny_model(folder / "student", seed=1, vocab_size=VOCABULARY),
        save_tiny_model(folder / "teacher", seed=2, vocab_size=VOCABULARY),
    )


def loaded(
    name: str, models: tuple[str, str], ds: DeepSpeedConfig
) -> tuple[OfflineTask[Any, Any, Any], nn.Module, Any]:
    """Return a task with its frozen models, the model to train, and a micro-batch."""
    task = task_of(name, *models, ds)
    frozen: dict[str, Any] = {flag: Frozen(load()) for flag, load in task.frozen_models().items()}
    task.frozen = frozen
    micro = task.collate([*rows_of(name, 0), *rows_of(name, 1)])
    return task, task.load_model().train(), micro


def loss_and_gradients(
    name: str, models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, rows: int
) -> tuple[dict[str, Any], int, int]:
    """Return the loss and the gradients, the largest tensor's size, and the number of logits."""
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=True, attn_implementation="sdpa")
    task, model, micro = loaded(name, models, ds)
    counts = task.counts(micro)
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", rows * VOCABULARY)
    with LargestTensor() as largest:
        loss, metrics = task.loss(model, micro, counts)
        loss.backward()
    found: dict[str, Any] = {"loss": loss.detach(), **values(metrics)}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return found, largest.numel, round(sum(counts.values())) * VOCABULARY


@pytest.mark.parametrize("name", ["kd", "kd_top", "prm_vocabulary", "prm_soft", "sft"])
def test_loss_holds_one_chunk_of_logits_and_does_not_depend_on_the_chunk_size(
    name: str, models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunked, largest, _ = loss_and_gradients(name, models, monkeypatch, SOME_ROWS)
    weight = VOCABULARY * SIZES["hidden_size"]
    assert largest == max(weight, SOME_ROWS * VOCABULARY)
    whole, largest, logits = loss_and_gradients(name, models, monkeypatch, 1000)
    assert largest == logits > weight, "a test with fewer logits could not fail"
    torch.testing.assert_close(chunked, whole)
