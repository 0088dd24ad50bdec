"""Tests that checkpointing some layers and offloading their inputs change no results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from openrlhf.config.flags import UserError
from openrlhf.config.shared import TrainedModelConfig
from openrlhf.core.batches import offsets_of
from openrlhf.models import checkpointing
from openrlhf.models.checkpointing import checkpoint_layers
from openrlhf.models.policy import PolicyModel
from tests.loading import load_spec
from tests.tiny import SIZES, save_tiny_model

LAYERS, HIDDEN = 5, SIZES["hidden_size"]
LENGTHS = [7, 9]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def loss_and_gradients(path: str, **flags: Any) -> tuple[list[Tensor], list[int]]:
    """Return the loss, all gradients, and the number of times that each layer ran."""
    training = TrainedModelConfig(**flags)
    model = PolicyModel.load(load_spec(path, packing=True, training=training)).train()
    runs = [0] * LAYERS
    decoder: Any = model.hf.get_decoder()
    for number, layer in enumerate(decoder.layers):

        def count(*_: Any, number: int = number) -> None:
            runs[number] += 1

        layer.register_forward_pre_hook(count)
    tokens = torch.arange(4, 4 + sum(LENGTHS))
    wanted = torch.ones(len(tokens), dtype=torch.bool)
    loss = model(tokens, offsets_of(LENGTHS), wanted).logprobs.square().sum()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [loss.detach(), *gradients], runs


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_every_nth_layer_is_recomputed_and_gradients_do_not_change(
    path: str, every: int, reentrant: bool, offload: bool
) -> None:
    expected, runs = loss_and_gradients(path)
    assert runs == [1] * LAYERS
    found, runs = loss_and_gradients(
        path,
        gradient_checkpointing_enable=True,
        gradient_checkpointing_every=every,
        gradient_checkpointing_offload=offload,
        gradient_checkpointing_reentrant=reentrant,
    )
    assert runs == [2 if number % every == 0 else 1 for number in range(LAYERS)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_offload_stores_only_the_inputs_of_recomputed_layers(
    path: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded copies (in CPU memory on a GPU machine) are read back in the backward pass."""
    stored: list[tuple[int, ...]] = []
    loaded: list[tuple[int, ...]] = []

    def store(tensor: Tensor) -> Tensor:
        if tensor.numel():  # ignore the checkpoint's empty placeholder
            stored.append(tuple(tensor.shape))
        return tensor.double()

    def load(tensor: Tensor) -> Tensor:
        if tensor.numel():
            loaded.append(tuple(tensor.shape))
        return tensor.float()

    def in_cpu_memory(*, pin_memory: bool) -> saved_tensors_hooks:
        return saved_tensors_hooks(store, load)

    expected, _ = loss_and_gradients(path)
    monkeypatch.setattr(checkpointing, "save_on_cpu", in_cpu_memory)
    found, _ = loss_and_gradients(
        path,
        gradient_checkpointing_enable=True,
        gradient_checkpointing_every=2,
        gradient_checkpointing_offload=True,
        gradient_checkpointing_reentrant=reentrant,
    )
    assert stored == loaded == [(1, sum(LENGTHS), HIDDEN)] * 3
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "flags",
    [{"gradient_checkpointing_every": 2}, {"gradient_checkpointing_offload": True}, {}],
    ids=str,
)
def test_model_without_gradient_checkpointing_support_is_rejected(
    path: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = AutoModelForCausalLM.from_pretrained(path)
    if flags:
        monkeypatch.setattr(checkpointing, "GradientCheckpointingLayer", torch.nn.Conv1d)
    else:
        monkeypatch.setattr(type(hf), "supports_gradient_checkpointing", False)
    with pytest.raises(UserError, match="gradient_checkpointing"):
        checkpoint_layers(hf, TrainedModelConfig(**flags))
