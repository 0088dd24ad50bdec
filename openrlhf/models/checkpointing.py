"""Gradient checkpointing: running layers again in the backward pass to save memory.

Chen et al. 2016, arXiv:1604.06174
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openrlhf.config.flags import UserError
from openrlhf.config.shared import TrainedModelConfig


def checkpoint_layers(model: PreTrainedModel, settings: TrainedModelConfig) -> None:
    """Make every N-th layer keep only its input and run again in the backward pass.

    The inputs may stay in CPU memory until the backward pass. Raises UserError for a model whose
    layers do not support checkpointing.
    """
    every = settings.gradient_checkpointing_every
    offload = settings.gradient_checkpointing_offload
    layers: list[Any] = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layers.append(module)
    if not (model.supports_gradient_checkpointing and (layers or (every == 1 and not offload))):
        raise UserError(
            f"{model.name_or_path}: {type(model).__name__} does not support gradient checkpointing "
            "with these flags. Leave out --model.gradient_checkpointing_every and "
            "--model.gradient_checkpointing_offload (in RL: --actor.…), or, if they are not set, "
            "--model.gradient_checkpointing_enable."
        )
    arguments = {"use_reentrant": settings.gradient_checkpointing_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    for number, layer in enumerate(layers):
        if number % every:
            layer.gradient_checkpointing = False
        elif offload:
            layer._gradient_checkpointing_func = _offloaded(layer._gradient_checkpointing_func)


def _offloaded(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function that keeps a layer's input in CPU memory.

    On a CPU, tensors are not copied.
    """

    def checkpoint_on_cpu(function: Callable[..., Any], *inputs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(function, *inputs)

    return checkpoint_on_cpu
