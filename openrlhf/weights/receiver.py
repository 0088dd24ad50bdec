"""The engine's half of a publication."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from openrlhf.weights.buckets import bucket_hash, bucket_nbytes, unpack
from openrlhf.weights.manifest import WeightManifest
from openrlhf.weights.transport import Channel


class Intake:
    """Receives a publication while the model's loader consumes the tensors, and counts the consumed
    tensors.
    """

    def __init__(self, manifest: WeightManifest, channel: Channel, device: torch.device) -> None:
        self.manifest = manifest
        self.channel = channel
        self.device = device
        self.hashes: list[int] = []
        self.sent_hashes: tuple[int, ...] = ()
        self.loads: Counter[str] = Counter()
        self._stream = self._receive()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every announced weight, counted when the loader asks for it."""
        for name, tensor in self._stream:
            self.loads[name] += 1
            yield name, tensor

    def finish(self) -> None:
        """Receive the tensors that the loader did not read, and then the sender's hashes."""
        for _ in self._stream:
            pass
        theirs = torch.empty(8 * len(self.hashes), dtype=torch.uint8, device=self.channel.device)
        self.channel.receive(theirs)
        self.sent_hashes = tuple(theirs.view(torch.int64).tolist())

    def _receive(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.manifest.buckets():
            # a new buffer for each bucket: vLLM keeps views of it until the last tensor of a layer
            # has come
            buffer = torch.empty(
                bucket_nbytes(bucket), dtype=torch.uint8, device=self.channel.device
            )
            self.channel.receive(buffer)
            self.hashes.append(bucket_hash(buffer))
            yield from unpack(bucket, buffer.to(self.device))
