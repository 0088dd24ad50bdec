"""Optimizers by name, and the learning-rate schedules of Transformers."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler

from openrlhf.algorithms.registry import Registry
from openrlhf.config.shared import OptimizerConfig

# Parameters whose names end like this are not decayed (biases and normalisations).
NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
DECAYING = 0.1  # of the steps, the last ones of warmup_stable_decay

logger = logging.getLogger(__name__)
OPTIMIZERS: Registry[Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]] = Registry(
    "optimizer"
)


@OPTIMIZERS.register("adam")
def adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """AdamW.  Loshchilov & Hutter 2019, arXiv:1711.05101"""
    adam = settings.adam
    return torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=True)


def adamw_in_cpu_memory(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """AdamW on CPU cores: DeepSpeed's, which is compiled once (a minute), or torch's where it
    cannot be compiled.
    """
    adam = settings.adam
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps)
    except Exception as error:  # a compiler fails in many ways
        logger.warning(
            "--ds.adam_offload uses torch's AdamW: DeepSpeedCPUAdam did not compile here (%s).",
            error,
        )
        return adamw(groups, settings)


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerConfig,
    *,
    offload: bool = False,
) -> Optimizer:
    """The optimizer of --optim over the trained parameters. Raises ValueError for an unregistered
    name.

    `offload`: its state is in CPU memory, and Adam steps there.
    """
    make = (
        adamw_in_cpu_memory if offload and settings.optim == "adam" else OPTIMIZERS[settings.optim]
    )
    return make(parameter_groups(named_parameters, settings.adam.weight_decay), settings)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two parameter groups, with and without weight decay. Empty groups are left out: schedulers
    fail on them.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    decayed = [p for name, p in trained if not name.endswith(NO_DECAY)]
    spared = [p for name, p in trained if name.endswith(NO_DECAY)]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_schedule(optimizer: Any, settings: OptimizerConfig, total_steps: int) -> Any:
    """Transformers' schedule over `total_steps` optimizer steps. Three schedules use
    `min_lr_ratio`.

    The first step of a warm-up has a learning rate of 0, so a single step does not warm up.
    """
    options: dict[str, float] = {}
    if settings.lr_scheduler in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        options = {"min_lr_rate": settings.min_lr_ratio}
    if settings.lr_scheduler == "warmup_stable_decay":
        options = {
            "min_lr_ratio": settings.min_lr_ratio,
            "num_decay_steps": math.ceil(total_steps * DECAYING),
        }
    return get_scheduler(
        settings.lr_scheduler,
        optimizer,
        num_warmup_steps=math.ceil(total_steps * settings.lr_warmup_ratio)
        if total_steps > 1
        else 0,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=options,
    )
