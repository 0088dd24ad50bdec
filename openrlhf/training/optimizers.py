"""Optimizers by name, and learning-rate schedules from Transformers."""

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler

from openrlhf.algorithms.registry import Registry
from openrlhf.config import choices
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.reporting import warn
from openrlhf.training.compiling import compiling
from openrlhf.training.muon import Muon
from openrlhf.training.whole import full_shape

# Suffixes of parameter names that get no weight decay: biases and normalization weights.
NO_DECAY_SUFFIXES = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DECAY_FRACTION = 0.1  # fraction of the steps in the decay phase of warmup_stable_decay


@runtime_checkable
class MovableState(Protocol):
    """An optimizer that moves its own state, because the state's names are unknown to DeepSpeed."""

    def move_state(self, device: torch.device) -> None:
        """Move the state to `device`."""


OPTIMIZERS: Registry[Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]] = Registry(
    "optimizer", choices.OPTIMIZERS, choices.OptimizerTraits
)


@OPTIMIZERS.register("adam")
def adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return AdamW.

    Loshchilov & Hutter 2019, arXiv:1711.05101
    """
    return torch.optim.AdamW(groups, fused=True, **_adam(settings))


def _adam(settings: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of AdamW that are common to all implementations."""
    adam = settings.adam
    return {"lr": adam.lr, "betas": adam.betas, "eps": adam.eps}


def adamw_in_cpu_memory(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return DeepSpeed's AdamW for CPUs, or torch's AdamW if DeepSpeed's version cannot be
    compiled.

    DeepSpeed's optimizer takes about a minute to compile on its first use.
    """
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with compiling():
            return DeepSpeedCPUAdam(groups, **_adam(settings))
    except Exception as error:  # a failing compiler may raise any exception
        warn(
            "The optimizer in CPU memory is torch's AdamW: DeepSpeedCPUAdam could not be compiled "
            f"({error})."
        )
        return adamw(groups, settings)


def repeat_steps(optimizer: Any) -> None:
    """Bring DeepSpeed's AdamW for CPUs, whose state has been read, to the step of that state.

    The operator multiplies β₁ᵗ and β₂ᵗ up step by step. For a step other than the next one, it
    computes them with `pow`, which rounds differently, and a resumed run would have other weights.
    The earlier steps are therefore repeated on an unused weight. Does nothing for other optimizers.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    group = optimizer.param_groups[0]
    numbers = (0.0, *group["betas"], group["eps"], 0.0, True)
    unused = [torch.zeros(1) for _ in range(4)]  # weight, gradient, moments
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *numbers, *unused)


def match_step_counters(optimizer: Any) -> None:
    """Turn the step counters of fused optimizers, whose state has been read, into tensors.

    The state may come from an optimizer in CPU memory, which counts with integers. The kernels
    require counters on the device of the weights.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = torch.as_tensor(
                    state["step"], dtype=torch.float32, device=parameter.device
                )


@OPTIMIZERS.register("muon")
def muon(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return an optimizer with Muon for matrices and AdamW for all other parameters."""
    own = settings.muon
    for group in groups:
        if group["is_muon"]:
            group.update(
                lr=own.lr,
                momentum=own.momentum,
                nesterov=own.nesterov,
                iterations=own.ns_steps,
            )
    return Muon(groups, fused=True, **_adam(settings))


@OPTIMIZERS.register("adam_8bit")
def adam_8bit(groups: list[dict[str, Any]], settings: OptimizerConfig) -> Optimizer:
    """Return AdamW with 8-bit moments for the groups with `is_8bit`.

    Dettmers et al. 2021, arXiv:2110.02861
    """
    from openrlhf.training.adam_8bit import Adam8bit  # bitsandbytes is optional

    return Adam8bit(groups, **_adam(settings))


def make_optimizer(
    module: nn.Module, settings: OptimizerConfig, *, offload: bool = False
) -> Optimizer:
    """Return the optimizer named by --optim for the trained parameters of `module`.

    With `offload`, the optimizer state is in CPU memory and Adam runs on the CPU. Raises ValueError
    for an unregistered name.
    """
    make = OPTIMIZERS[settings.optim]
    traits = choices.OPTIMIZERS[settings.optim]
    if offload and traits.has_cpu_version:
        make = adamw_in_cpu_memory
    return make(parameter_groups(module, settings.adam.weight_decay, traits), settings)


def parameter_groups(
    module: nn.Module, weight_decay: float, traits: choices.OptimizerTraits
) -> list[dict[str, Any]]:
    """Divide the trained parameters into groups with and without weight decay.

    If the optimizer treats some weights specially, those weights form the first group, and every
    group has an entry that marks such weights: with `muon`, `is_muon` marks the matrices of hidden
    layers; with `adam_8bit`, `is_8bit` marks the weights with 8-bit moments. Empty groups are
    omitted, because schedulers fail on empty groups.
    """
    special: set[nn.Parameter] = set()
    if traits.mark:
        special = _special_parameters(module, traits)
    first: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(NO_DECAY_SUFFIXES):
            undecayed.append(parameter)
        elif parameter in special:
            first.append(parameter)
        else:
            decayed.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": first, "weight_decay": weight_decay},
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    if traits.mark:
        for group in groups:
            group[traits.mark] = group["params"] is first
    return [group for group in groups if group["params"]]


def _special_parameters(module: nn.Module, traits: choices.OptimizerTraits) -> set[nn.Parameter]:
    """Return the matrices and stacks of matrices in hidden layers, or all large weights.

    Embeddings are neither, and are recognized by their class or by their name (which adapters
    keep). An embedding's row gets no gradient while its token does not occur. In 8 bits, the row's
    second moments would become 0 before its first moments, and its next steps would be huge.
    """
    special: set[nn.Parameter] = set()
    for parameter in module.parameters():
        shape = full_shape(parameter)
        if traits.only_hidden_matrices:
            is_special = len(shape) >= 2
        else:
            is_special = math.prod(shape) >= traits.min_special_size
        if is_special:
            special.add(parameter)
    for name, layer in module.named_modules():
        is_excluded = isinstance(layer, nn.Embedding) or "embed" in name
        if traits.only_hidden_matrices:
            is_excluded = is_excluded or isinstance(layer, CONVOLUTIONS) or name == "head"
        if is_excluded:
            special.difference_update(layer.parameters())
    return special


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
