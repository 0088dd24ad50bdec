"""Kinds of memory, and the phases of a training step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from openrlhf.units import GIB, MIB


class Instant(StrEnum):
    """A phase of a run. The memory at an instant is the peak memory during the phase."""

    LOAD = "load"  # the models are loaded and the optimizer is created
    IDLE = "idle"  # between two phases
    GENERATE = "generate"
    SCORE = "score"  # forward passes without gradient
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # the optimizer updates the weights
    PUBLISH = "publish"  # new weights are sent to the engines


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory in bytes, by kind."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0  # moments and float32 master weights
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    publication: int = 0  # buffers that send weights to the engines
    framework: int = 0  # libraries, device contexts, process groups

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(getattr(self, kind) for kind in KINDS)

    def __add__(self, other: Usage) -> Usage:
        summed = {kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS}
        return Usage(**summed)

    def __mul__(self, count: int) -> Usage:
        return Usage(**{kind: getattr(self, kind) * count for kind in KINDS})


def largest(*usages: Usage) -> Usage:
    """Return the usage with the largest total."""
    return max(usages, key=lambda usage: usage.total)


KINDS = tuple(field.name for field in fields(Usage))


def gib(size: float) -> str:
    """Format a number of bytes in GiB or MiB, for tables and messages."""
    if size >= 100 * GIB:
        return f"{size / GIB:,.0f} GiB"
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.0f} MiB"
