"""Measured constants of the memory formulas, by device kind."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.units import MIB


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Measured numbers: sizes of libraries, and factors applied to computed sizes."""

    device: str  # "cpu" or "cuda"
    measured: bool  # False if some numbers are estimates not yet confirmed by measurement
    process_bytes: int  # size of a training process before it loads a model
    engine_process_bytes: int  # size of an engine's process before it loads its model
    reserve: float  # share of a prediction that must remain free, in case the prediction is too low
    role_bytes: int = 0  # overhead of a process's first model, in addition to its tensors
    rounded_bytes: int = 0  # oneDNN's compiled kernels, in a process with bfloat16 models
    sharded_bytes: int = 0  # DeepSpeed's buffers for a trained model under ZeRO 3
    allocator_factor: float = 1.0  # applied to all activations and logits, for fragmentation
    engine_bytes: int = 0  # size of an engine without its weights and KV cache


CPU = Constants(
    device="cpu",
    measured=True,
    process_bytes=450 * MIB,
    engine_process_bytes=700 * MIB,
    reserve=0.05,
    role_bytes=4 * MIB,
    rounded_bytes=8 * MIB,
    sharded_bytes=8 * MIB,
    engine_bytes=200 * MIB,
)
# `process_bytes` and `allocator_factor` were measured on one H100 with torch 2.11.
# `process_bytes` is the size of the CUDA context with torch's kernels.
# `allocator_factor` covers memory held by PyTorch's allocator in addition to the tensors.
# `reserve` is larger than the largest measured error, because only one rank was measured.
# An optimizer step needed 5.0 % more than predicted (10,206 MiB instead of 9,722 MiB).
# The numbers for the engine are estimates.
CUDA = Constants(
    device="cuda",
    measured=False,
    process_bytes=1707 * MIB,
    engine_process_bytes=1024 * MIB,
    reserve=0.125,
    allocator_factor=1.02,
    engine_bytes=1024 * MIB,
)
