"""Trained weights on one rank, and the sizes of the optimizer's moments for these weights."""

from __future__ import annotations

from openrlhf.planning.roles import ModelRole
from openrlhf.planning.shapes import EMBEDDINGS, HEADS, Weight

ROW_SPLIT = ("o_proj", "down_proj")  # layers that tensor parallelism splits along their inputs
ADAM_BYTES = 8  # size of Adam's two moments, which every optimizer stores for some weights
# Size in bytes of a weight's moments, for weights that an optimizer treats specially.
# With adam_8bit, each of the two moments takes one byte per weight, plus a float32 scale per block
# of 256 weights.
SPECIAL_BYTES = {"muon": 4, "adam_8bit": 2 * (1 + 4 / 256)}
MIN_8BIT_SIZE = 4096  # `training.optimizers.MIN_8BIT_SIZE`


def local_size(role: ModelRole, weight: Weight) -> int:
    """Return the number of elements of a weight on one rank after tensor parallelism."""
    is_split = weight.is_linear and (not role.shape.experts or ".self_attn." in weight.name)
    return weight.numel // role.tp if is_split else weight.numel


def adapter_sizes(role: ModelRole, weight: Weight, tp: int) -> tuple[int, ...]:
    """Return the number of elements of each part of a weight's adapter on one of `tp` ranks.

    The parts are two matrices and, with DoRA, a vector.
    """
    if not weight.is_linear or not _is_adapted(role, weight):
        return ()
    outputs, inputs = weight.shape
    if weight.module in ROW_SPLIT:
        inputs //= tp
    else:
        outputs //= tp
    magnitudes = weight.shape[0] if role.dora else 0
    return (role.lora_rank * outputs, role.lora_rank * inputs, magnitudes)


def _is_adapted(role: ModelRole, weight: Weight) -> bool:
    return role.lora_modules == ("all-linear",) or weight.module in role.lora_modules


def adapter_size(role: ModelRole, weight: Weight) -> int:
    """Return the number of elements of a weight's adapter on one rank."""
    return sum(adapter_sizes(role, weight, role.tp))


def trained_weights(role: ModelRole) -> int:
    """Return the number of trained weights on one rank, before ZeRO."""
    if not role.trained:
        return 0
    if not role.lora_rank:
        return sum(local_size(role, weight) for weight in role.shape.weights)
    adapters = sum(adapter_size(role, weight) for weight in role.shape.weights)
    if role.shape.scalar:
        adapters += role.shape.hidden
    return adapters


def largest_trained(role: ModelRole) -> int:
    """Return the number of elements in the largest trained weight on one rank, before ZeRO."""
    size_of = adapter_size if role.lora_rank else local_size
    return max((size_of(role, weight) for weight in role.shape.weights), default=0)


def moment_width(role: ModelRole) -> float:
    """Return the mean size of the optimizer's moments per trained weight, in bytes."""
    if role.optimizer not in SPECIAL_BYTES:
        return ADAM_BYTES
    special = 0
    for weight in role.shape.weights:
        if role.lora_rank:
            special += _special_in_adapter(role, weight)
        elif _is_special(role, weight):
            special += local_size(role, weight)
    share = special / trained_weights(role)
    return share * SPECIAL_BYTES[role.optimizer] + (1 - share) * ADAM_BYTES


def _is_special(role: ModelRole, weight: Weight) -> bool:
    """Return whether muon or adam_8bit treats a weight specially.

    `training.optimizers.parameter_groups` does the same for the parameters of a model.
    """
    if len(weight.shape) == 1 or "embed" in weight.name or EMBEDDINGS.fullmatch(weight.name):
        return False
    if role.optimizer == "adam_8bit":
        return weight.numel >= MIN_8BIT_SIZE
    return not HEADS.fullmatch(weight.name) and "conv" not in weight.name


def _special_in_adapter(role: ModelRole, weight: Weight) -> int:
    """Return how many elements of a weight's adapter muon or adam_8bit treats specially.

    The decision depends on the sizes before tensor parallelism.
    """
    whole = adapter_sizes(role, weight, 1)
    local = adapter_sizes(role, weight, role.tp)
    if role.optimizer == "muon":
        return sum(local[:2])  # the matrices
    special = 0
    for size, part in zip(whole, local, strict=True):
        if size >= MIN_8BIT_SIZE:
            special += part
    return special
