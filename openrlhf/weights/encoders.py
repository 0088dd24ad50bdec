"""Encoders that turn the policy's weights into the tensors of a manifest.

`workers.policy.PolicyWorker` creates two encoders: one for the full model, and one for the adapter
served by the engines. Publishing only changed weights would need a third encoder, a
`WeightManifest` field that announces it, and a branch in `rollout.engine_worker` that loads it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.weights.buckets import NamedTensor, TensorSpec
from openrlhf.weights.manifest import WeightManifest


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A way to encode weights.

    `blanks` and `gathered` yield the same names in the same order.
    """

    blanks: Iterable[NamedTensor]  # the trainer's tensors on the meta device
    # Yields the trainer's tensors in buckets of the given number of bytes. All ranks must iterate.
    # A bucket is valid until the next bucket is requested.
    gathered: Callable[[int], Iterable[list[NamedTensor]]]
    # Returns the engine's tensors for one of the trainer's tensors, under the engine's names.
    stored: Callable[[str, torch.Tensor], Iterable[NamedTensor]]
    adapter: dict[str, Any] | None = None  # see `WeightManifest.adapter`

    def encode(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the engine's tensors for the trainer's tensors, which are read one at a time."""
        for name, tensor in tensors:
            yield from self.stored(name, tensor)

    def manifest(self, *, version: int, dtype: torch.dtype, bucket_bytes: int) -> WeightManifest:
        """Return the manifest of the encoded weights, which are sent as `dtype`."""
        specs = tuple(
            TensorSpec(name=name, dtype=dtype, shape=tuple(blank.shape))
            for name, blank in self.encode(self.blanks)
        )
        return WeightManifest(
            version=version, specs=specs, bucket_bytes=bucket_bytes, adapter=self.adapter
        )
