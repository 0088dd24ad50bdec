"""Optimizers by name, and the learning-rate schedules of Transformers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler

from openrlhf.algorithms.registry import Registry
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.reporting import warn
from openrlhf.training.compiling import compiling
from openrlhf.training.muon import Muon
from openrlhf.training.whole import full_shape

# Suffixes of parameter names that get no weight decay: biases and normalization weights.
NO_DECAY_SUFFIXES = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DECAY_FRACTION = 0.1  # fraction of the steps in the decay phase of warmup_stable_decay

OPTIMIZERS: Registry[Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]] = Registry(
    "optimizer"
)


@OPTIMIZERS.register("adam")
def adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return AdamW.

    Loshchilov & Hutter 2019, arXiv:1711.05101
    """
    adam = settings.adam
    return torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=True)


def adamw_in_cpu_memory(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return DeepSpeed's AdamW for CPUs, or torch's AdamW if DeepSpeed's cannot be compiled.

    DeepSpeed's optimizer takes about a minute to compile on its first use.
    """
    adam = settings.adam
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with compiling():
            return DeepSpeedCPUAdam(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps)
    except Exception as error:  # compilers can fail with any exception
        warn(
            "--ds.adam_offload uses torch's AdamW: DeepSpeedCPUAdam could not be compiled "
            f"({error})."
        )
        return adamw(groups, settings)


@OPTIMIZERS.register("muon")
def muon(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return Muon for the groups of matrices, and AdamW for all other parameters."""
    adam = settings.adam
    for group in groups:
        if group["is_muon"]:
            group["lr"] = settings.muon.lr
            group["momentum"] = settings.muon.momentum
            group["nesterov"] = settings.muon.nesterov
            group["iterations"] = settings.muon.ns_steps
    return Muon(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=True)


def make_optimizer(
    module: nn.Module, settings: OptimizerConfig, *, offload: bool = False
) -> Optimizer:
    """Return the optimizer named by --optim for the trained parameters of `module`.

    With `offload`, the optimizer state is in CPU memory and Adam runs on the CPU. Raises ValueError
    for an unregistered name.
    """
    groups = parameter_groups(module, settings.adam.weight_decay, muon=settings.optim == "muon")
    if offload and settings.optim == "adam":
        return adamw_in_cpu_memory(groups, settings)
    return OPTIMIZERS[settings.optim](groups, settings)


def parameter_groups(
    module: nn.Module, weight_decay: float, *, muon: bool = False
) -> list[dict[str, Any]]:
    """Return the parameter groups of trained parameters with and without weight decay.

    With `muon`, the hidden layers' matrices are the first group, and each group has an entry
    `is_muon`. Empty groups are omitted, because schedulers fail on them.
    """
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    not_hidden = _parameters_outside_hidden_layers(module)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(NO_DECAY_SUFFIXES):
            undecayed.append(parameter)
        elif muon and len(full_shape(parameter)) >= 2 and parameter not in not_hidden:
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    if muon:
        for group in groups:
            group["is_muon"] = group["params"] is matrices
    return [group for group in groups if group["params"]]


def _parameters_outside_hidden_layers(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embeddings, convolutions and the model's head.

    Embeddings are recognized by their class or by their name, which adapters keep.
    """
    found: set[nn.Parameter] = set()
    for name, layer in module.named_modules():
        is_embedding = isinstance(layer, nn.Embedding) or "embed" in name
        if is_embedding or isinstance(layer, CONVOLUTIONS) or name == "head":
            found.update(layer.parameters())
    return found


def make_schedule(optimizer: Any, settings: OptimizerConfig, total_steps: int) -> Any:
    """Return the Transformers learning-rate schedule over `total_steps` optimizer steps.

    Three schedules use `min_lr_ratio`. The first step of a warmup has a learning rate of 0, so a
    run with only one step has no warmup.
    """
    options: dict[str, float] = {}
    if settings.lr_scheduler in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        options = {"min_lr_rate": settings.min_lr_ratio}
    if settings.lr_scheduler == "warmup_stable_decay":
        options = {
            "min_lr_ratio": settings.min_lr_ratio,
            "num_decay_steps": math.ceil(total_steps * DECAY_FRACTION),
        }
    warmup_steps = 0
    if total_steps > 1:
        warmup_steps = math.ceil(total_steps * settings.lr_warmup_ratio)
    return get_scheduler(
        settings.lr_scheduler,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=options,
    )
