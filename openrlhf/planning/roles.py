"""Inputs of the memory formulas: a model with its parallelism, precision and largest passes."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.planning.shapes import ModelShape

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GEMMA_LIKE = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The largest forward pass of a model on one rank."""

    tokens: int  # positions that the decoder computes on this rank, with padding
    longest: int  # tokens of the longest sequence
    scored: int  # positions with logits (values, for a scalar model)
    packed: bool = True  # False: a right-padded block with an attention mask


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """A model on one rank. All sizes in `shape` are those of the whole model."""

    name: str  # policy, critic, reference, reward or teacher
    shape: ModelShape
    dtype: str = "bf16"  # of the weights
    dp: int = 1  # ranks with different data
    tp: int = 1  # ranks that split each layer
    sp: int = 1  # ranks that split each sequence
    zero_stage: int = 0  # the stage in effect; frozen models are sharded only in stage 3
    trained: bool = False
    optimizer: str = "adam"
    grad_accum_dtype: str = "fp32"
    adam_offload: bool = False
    param_offload: bool = False  # in CPU memory between uses: ZeRO 3 parameters, or a frozen model
    sleeps: bool = False  # the training state is in CPU memory between updates
    lora_rank: int = 0
    lora_modules: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    load_in_4bit: bool = False
    ema: bool = False
    gradient_checkpointing: bool = False
    flash: bool = False  # FlashAttention kernels, which need no mask and no float32 copies
    overlap_comm: bool = False
    entropy: bool = False  # the policy's entropy is computed
    keeps_logits: bool = False  # logits go through a function with autograd (KD, PRM, adapters)
    teacher_bytes: int = 0  # a teacher's outputs, which are kept until the backward pass ends
    training: Pass | None = None
    scoring: Pass | None = None
    window: int = 1  # micro-batches per optimizer step
    publishes: bool = False  # True if the weights are sent to engines
    adapter_only: bool = False  # True if only the adapter is sent

    @property
    def width(self) -> int:
        """Bytes per weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def ranks(self) -> int:
        """The number of ranks that share the optimizer state (ZeRO)."""
        return self.dp * self.sp

    @property
    def sharded(self) -> bool:
        """True if ZeRO 3 shards the weights."""
        return self.zero_stage == 3

    @property
    def full_training(self) -> bool:
        """True if all weights are trained."""
        return self.trained and not self.lora_rank


@dataclass(frozen=True, kw_only=True)
class EngineRole:
    """An inference engine on one of its devices."""

    shape: ModelShape
    dtype: str = "bf16"
    devices: int = 1  # devices that split the engine's weights and KV cache
    memory_share: float | None = None  # of the device; None: `cache_bytes` is fixed (CPU)
    cache_bytes: int = 0
    max_len: int = 2048  # tokens in the longest sequence
    sleeps: bool = False  # the engine frees its device memory between rollouts
    quantized: bool = False
    bucket_bytes: int = 0  # the buffer that receives published weights

    @property
    def width(self) -> float:
        """Bytes per weight."""
        return 1.0 if self.quantized else DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Processes that host the same models, each on one device. `engine` shares their devices."""

    name: str
    processes: int
    roles: tuple[ModelRole, ...] = ()
    engine: EngineRole | None = None
    engines: int = 0

    @property
    def devices(self) -> int:
        """The number of devices that the group takes."""
        if self.roles:
            return self.processes
        return self.engines * (self.engine.devices if self.engine else 0)
