"""Memory of forward and backward passes: activations, temporary tensors and logits.

The formulas count the tensors that PyTorch's autograd saves in the layers of Transformers: the
inputs of matrix products, both factors of a product of two activations, and the float32 copies in
norms. `b` is the number of bytes per activation.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.planning.constants import Constants
from openrlhf.planning.roles import GEMMA_LIKE, ModelRole, Pass
from openrlhf.planning.shapes import ATTENTION, MLP

ADAPTED_LAYERS = 7  # linear layers in a decoder layer; each adapter saves `rank` values per token
CHUNK_LOGITS = 1 << 25  # `algorithms.tensors.CHUNK_LOGITS`: number of logits in a chunk


@dataclass(frozen=True)
class PassBytes:
    """Size in bytes of the tensors of one pass on one rank."""

    saved: int  # activations that are kept for the backward pass
    recomputed: int  # one layer's activations, with gradient checkpointing
    scoring: int  # temporary tensors of a layer in a pass without gradient
    training: int  # temporary tensors in a pass with gradient, which saves most of them
    forward_logits: int  # a chunk of logits with its temporary tensors
    backward_logits: int


def pass_bytes(role: ModelRole, batch: Pass, constants: Constants) -> PassBytes:
    """Return the sizes of a pass's tensors, scaled by the measured factor."""
    saved, recomputed = _saved(role, batch, constants)
    scoring = batch.tokens * _scoring_per_token(role, batch, constants)
    training = batch.tokens * 2 * role.width * role.shape.hidden
    forward_logits, backward_logits = _logits(role, batch)
    factor = constants.allocator_factor
    return PassBytes(
        saved=round(factor * saved),
        recomputed=round(factor * recomputed),
        scoring=round(factor * scoring),
        training=round(factor * training),
        forward_logits=round(factor * forward_logits),
        backward_logits=round(factor * backward_logits),
    )


def _saved(role: ModelRole, batch: Pass, constants: Constants) -> tuple[float, float]:
    """Return how many bytes a training pass keeps for its backward pass and how many it recomputes.

    With gradient checkpointing, a recomputed layer keeps only its input, which may be in CPU
    memory. The second returned value is the size of the largest recomputed layer's activations, or
    0.
    """
    shape, b = role.shape, role.width
    layers = 0.0
    largest = 0.0
    for number, window in enumerate(shape.windows):
        layer = _layer(role, batch, window, constants)
        if role.gradient_checkpointing and number % role.checkpoint_every == 0:
            largest = max(largest, layer)
        else:
            layers += layer
    inputs = input_bytes(role, batch)
    if role.checkpoint_offload and role.gradient_checkpointing:
        largest += inputs / role.recomputed_layers  # moved back to the device for recomputation
        inputs = 0
    head = batch.tokens * _norm(role) + batch.scored * b * shape.hidden
    if shape.scalar and b < 4:
        head += 4 * batch.scored * shape.hidden  # the head's inputs in float32
    return layers + inputs + head, largest


def input_bytes(role: ModelRole, batch: Pass) -> int:
    """Return the size of the inputs of all recomputed layers, in bytes."""
    return role.recomputed_layers * batch.tokens * role.width * role.shape.hidden


def _layer(role: ModelRole, batch: Pass, window: int | None, constants: Constants) -> float:
    """Return how many bytes one decoder layer saves for the backward pass."""
    shape, b = role.shape, role.width
    norms = shape.norms_per_layer * _norm(role) + 2 * b * shape.hidden
    attention = _attention(role, batch, constants)
    mask = 0.0
    has_mask = not batch.packed or (window is not None and batch.longest > window)
    if has_mask and not role.flash:
        # the kernel saves a floating-point copy of the boolean mask
        mask = b * batch.tokens * batch.longest / role.sp
    adapters = b * ADAPTED_LAYERS * role.lora_rank
    return batch.tokens * (norms + attention + _mlp(role) + adapters) + mask


def _norm(role: ModelRole) -> float:
    """Return how many bytes a norm saves per token: its float32 input and the normalized values.

    The normalized values are saved only if the norm's weight needs a gradient.
    """
    normalized = role.width
    if role.shape.model_type in GEMMA_LIKE:
        normalized = 4  # product with the weight, in float32
    if not role.full_training:
        normalized = 0
    return (4 + normalized) * role.shape.hidden


def _attention(role: ModelRole, batch: Pass, constants: Constants) -> float:
    """Return how many bytes attention saves per token: queries, keys, values and outputs."""
    shape, b = role.shape, role.width
    tp = role.split(ATTENTION)
    queries, keys = shape.queries / tp, shape.keys / tp
    states = 2 * queries + 2 * keys
    statistics = 4 * shape.heads / tp  # the scores' log-sum-exp
    norms = 0.0
    if shape.qk_norm:
        norms = (4 + b) * (queries + keys)
        if not role.full_training:
            norms = 4 * (queries + keys)
    if role.flash:
        return b * states + statistics + norms
    if batch.packed:
        kernel = 4 if constants.device == "cpu" else b  # a CPU computes attention in float32
        return kernel * states + b * queries + statistics + norms
    # Transformers repeats keys and values for every query head if there is a mask.
    return b * 4 * queries + statistics + norms


def _mlp(role: ModelRole) -> float:
    """Return how many bytes a dense MLP or a mixture of experts saves per token.

    An MLP saves the gate and up projections, the activated gate and the product.
    """
    shape, b = role.shape, role.width
    if not shape.experts:
        return 4 * b * shape.intermediate / role.split(MLP)
    routed = shape.experts_per_token * (4 * shape.intermediate + 2 * shape.hidden)
    return b * (routed + 4 * shape.shared_intermediate)


def _inner_width(role: ModelRole) -> float:
    """Return the number of elements per token in the inner activations of an MLP or of experts."""
    shape = role.shape
    if not shape.experts:
        return shape.intermediate / role.split(MLP)
    return shape.experts_per_token * (shape.intermediate + shape.hidden / 2)


def _scoring_per_token(role: ModelRole, batch: Pass, constants: Constants) -> float:
    """Return how many bytes per token a layer needs in a forward pass without gradient."""
    shape, b = role.shape, role.width
    inner = b * (3 * _inner_width(role) + 2 * shape.hidden)
    tp = role.split(ATTENTION)
    queries, keys = shape.queries / tp, shape.keys / tp
    attention = b * (2 * shape.hidden + 3 * (queries + keys))
    if batch.packed and not role.flash and constants.device == "cpu" and b < 4:
        attention += 4 * (2 * queries + 2 * keys)
    norm = 12 * shape.hidden + b * shape.hidden
    return max(inner, attention, norm)


def _logits(role: ModelRole, batch: Pass) -> tuple[float, float]:
    """Return the memory of the logits in a forward and in a backward pass, in bytes.

    Only one chunk of logits exists at a time. The backward pass recomputes each chunk, and
    accumulates the gradient of the output layer in float32.
    """
    shape, b = role.shape, role.width
    if shape.scalar:
        states = 4 * batch.scored * shape.hidden
        return states, states
    rows = min(batch.scored, max(1, CHUNK_LOGITS // shape.vocabulary))
    chunk = rows * shape.vocabulary
    copies = 4 if b < 4 else 0  # logits in float32
    previous = b if batch.scored > rows else 0  # the previous chunk is freed late
    forward = backward = b + copies + 4 + previous
    if role.entropy:
        forward += 12
    if role.keeps_logits:
        forward += 8
    if role.teacher_logits:
        forward += 8 + b  # the teacher's logits (as computed, and in float32) and probabilities
    if role.keeps_logits:
        backward += 16
    if role.teacher_logits:
        backward += 8  # the teacher's probabilities, and the gradient of their products
    head = 0
    if role.full_training:
        head = (4 + b) * shape.head_parameters
    states = b * batch.scored * shape.hidden
    return forward * chunk, backward * chunk + head + states
