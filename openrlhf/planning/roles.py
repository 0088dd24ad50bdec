"""Inputs to the memory formulas: models with their parallelism, precision and largest passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from openrlhf.planning.shapes import ModelShape, SplitError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GEMMA_LIKE = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The largest forward pass of a model on one rank."""

    tokens: int  # number of positions that the decoder computes on this rank, with padding
    longest: int  # number of tokens in the longest sequence
    scored: int  # number of positions for which logits (or scalar values) are computed
    packed: bool = True  # False for a right-padded block with an attention mask


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """A model on one rank. `shape` contains the sizes of the unsharded model."""

    name: str  # policy, critic, reference, reward or teacher
    shape: ModelShape
    dtype: str = "bf16"  # data type of the weights
    dp: int = 1  # number of ranks with different data
    tp: int = 1  # number of ranks that split each layer
    sp: int = 1  # number of ranks that split each sequence
    zero_stage: int = 0  # the effective stage; frozen models are sharded only in stage 3
    zpg: int = 1  # number of ranks that keep a second copy of the weights; 1 for no copy
    trained: bool = False
    optimizer: str = "adam"
    grad_accum_dtype: str = "fp32"
    adam_offload: bool = False
    param_offload: bool = False  # True if weights are in CPU memory between uses
    # True if the optimizer's state, or the weights, are on a drive instead of in CPU memory.
    optimizer_on_drive: bool = False
    weights_on_drive: bool = False
    sleeps: bool = False  # True if the training state is in CPU memory between updates
    lora_rank: int = 0
    lora_modules: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    load_in_4bit: bool = False
    ema: bool = False
    gradient_checkpointing: bool = False
    checkpoint_every: int = 1  # with gradient checkpointing, every N-th layer is recomputed
    checkpoint_offload: bool = False  # True if the inputs of recomputed layers are in CPU memory
    flash: bool = False  # True for FlashAttention, which needs no mask and no float32 copies
    overlap_comm: bool = False
    entropy: bool = False  # True if the policy's entropy is computed
    keeps_logits: bool = False  # True if autograd keeps the logits (KD, PRM, adapters)
    teacher_bytes: int = 0  # size of the teacher's outputs, kept until the backward pass ends
    teacher_logits: bool = False  # True if each chunk of logits comes with the teacher's logits
    training: Pass | None = None
    scoring: Pass | None = None
    window: int = 1  # number of micro-batches per optimizer step
    publishes: bool = False  # True if the weights are sent to engines
    adapter_only: bool = False  # True if only the adapter is sent

    @property
    def width(self) -> int:
        """Bytes per weight."""
        return DTYPE_BYTES[self.dtype]

    def split(self, part: str) -> int:
        """Return the number of ranks that split this part of each layer."""
        return 1 if part in self.shape.unsplit else self.tp

    @property
    def ranks(self) -> int:
        """The number of ranks over which ZeRO shards the optimizer state."""
        return self.dp * self.sp

    @property
    def sharded(self) -> bool:
        """True if ZeRO 3 shards the weights."""
        return self.zero_stage == 3

    @property
    def recomputed_layers(self) -> int:
        """The number of layers that the backward pass recomputes."""
        if not self.gradient_checkpointing:
            return 0
        return math.ceil(self.shape.layers / self.checkpoint_every)

    @property
    def full_training(self) -> bool:
        """True if all weights are trained."""
        return self.trained and not self.lora_rank


@dataclass(frozen=True, kw_only=True)
class EngineRole:
    """An inference engine on one of its devices."""

    shape: ModelShape
    dtype: str = "bf16"
    devices: int = 1  # number of devices that split the engine's weights and KV cache
    tp: int = 1  # number of devices that split each layer
    memory_share: float | None = None  # share of a device's memory; None with `cache_bytes`
    cache_bytes: int = 0
    max_len: int = 2048  # number of tokens in the longest sequence
    sleeps: bool = False  # True if the engine frees its device memory between rollouts
    quantized: bool = False
    bucket_bytes: int = 0  # size of the buffer that receives published weights

    @property
    def width(self) -> float:
        """Bytes per weight."""
        return 1.0 if self.quantized else DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """The size of the weights on one device, in bytes."""
        return self.width * self.shape.parameters / self.devices


def check_split(flag: str, ranks: int, heads: int, *, what: str) -> None:
    """Raise SplitError unless `heads` attention heads can be shared equally by `ranks` ranks.

    For the message, `what` names the heads and the model, and `flag` sets the number of ranks.
    """
    if heads % ranks == 0:
        return
    sizes = [str(size) for size in range(1, heads + 1) if heads % size == 0]
    raise SplitError(
        f"--{flag} {ranks} does not divide the {heads} {what}: use one of {', '.join(sizes)}."
    )


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Processes that host the same models, one process per device.

    The devices are shared with `engine`.
    """

    processes: int
    roles: tuple[ModelRole, ...] = ()
    engine: EngineRole | None = None
    engines: int = 0

    @property
    def devices(self) -> int:
        """The number of devices occupied by the group."""
        if self.roles:
            return self.processes
        return self.engines * (self.engine.devices if self.engine else 0)
