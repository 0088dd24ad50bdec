"""Trained weights on one rank, and the sizes of the optimizer's moments for these weights."""

from __future__ import annotations

from openrlhf.config.choices import OPTIMIZERS, OptimizerTraits
from openrlhf.planning.roles import ModelRole
from openrlhf.planning.shapes import EMBEDDINGS, HEADS, Weight

ROW_SPLIT = ("o_proj", "down_proj")  # layers that tensor parallelism splits along their inputs
# Size of Adam's two moments in bytes, which every optimizer stores for some weights.
ADAM_BYTES = OPTIMIZERS["adam"].moment_bytes


def local_size(role: ModelRole, weight: Weight) -> int:
    """Return the number of elements of a weight on one rank after tensor parallelism."""
    return weight.numel // (role.split(weight.part) if weight.is_linear else 1)


def adapter_sizes(role: ModelRole, weight: Weight, tp: int) -> tuple[int, ...]:
    """Return the number of elements of each part of a weight's adapter on one of `tp` ranks.

    The parts are two matrices and, with DoRA, a vector.
    """
    if not weight.is_linear or not _is_adapted(role, weight):
        return ()
    outputs, inputs = weight.shape
    tp = min(tp, role.split(weight.part))
    if weight.module in ROW_SPLIT:
        inputs //= tp
    else:
        outputs //= tp
    magnitudes = weight.shape[0] if role.dora else 0
    return (role.lora_rank * outputs, role.lora_rank * inputs, magnitudes)


def _is_adapted(role: ModelRole, weight: Weight) -> bool:
    return role.lora_modules == ("all-linear",) or weight.module in role.lora_modules


def _trained_size(role: ModelRole, weight: Weight) -> int:
    """Return the number of elements of a weight, or of its adapter if any, on one rank."""
    if role.lora_rank:
        return sum(adapter_sizes(role, weight, role.tp))
    return local_size(role, weight)


def trained_weights(role: ModelRole) -> int:
    """Return the number of trained weights on one rank, before ZeRO."""
    if not role.trained:
        return 0
    trained = sum(_trained_size(role, weight) for weight in role.shape.weights)
    if role.lora_rank and role.shape.scalar:
        trained += role.shape.hidden
    return trained


def largest_trained(role: ModelRole) -> int:
    """Return the number of elements in the largest trained weight on one rank, before ZeRO."""
    return max((_trained_size(role, weight) for weight in role.shape.weights), default=0)


def moment_width(role: ModelRole) -> float:
    """Return the mean size of the optimizer's moments per trained weight, in bytes."""
    traits = OPTIMIZERS[role.optimizer]
    if not traits.mark:
        return traits.moment_bytes
    special = 0
    for weight in role.shape.weights:
        if role.lora_rank:
            special += _special_in_adapter(role, weight, traits)
        elif _is_special(weight, traits):
            special += local_size(role, weight)
    share = special / trained_weights(role)
    return share * traits.moment_bytes + (1 - share) * ADAM_BYTES


def _is_special(weight: Weight, traits: OptimizerTraits) -> bool:
    """Return whether an optimizer treats a weight specially.

    `training.optimizers.parameter_groups` does the same for the parameters of a model.
    """
    if len(weight.shape) == 1 or "embed" in weight.name or EMBEDDINGS.fullmatch(weight.name):
        return False
    if traits.only_hidden_matrices:
        return not HEADS.fullmatch(weight.name) and "conv" not in weight.name
    return weight.numel >= traits.min_special_size


def _special_in_adapter(role: ModelRole, weight: Weight, traits: OptimizerTraits) -> int:
    """Return how many elements of a weight's adapter an optimizer treats specially.

    The decision depends on the sizes before tensor parallelism.
    """
    whole = adapter_sizes(role, weight, 1)
    local = adapter_sizes(role, weight, role.tp)
    if traits.only_hidden_matrices:
        return sum(local[:2])  # without the vector
    special = 0
    for size, part in zip(whole, local, strict=True):
        if size >= traits.min_special_size:
            special += part
    return special
