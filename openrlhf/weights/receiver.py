"""The receiver, which is the engine's half of a publication in each of its workers.

The receiver does not depend on vLLM, because the loader is an argument. This module must never
import DeepSpeed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from openrlhf.weights.buckets import NamedTensor, bucket_hash, bucket_nbytes, unpack
from openrlhf.weights.manifest import WeightManifest
from openrlhf.weights.receipts import WorkerReceipt
from openrlhf.weights.transport import Channel, Membership


class Delivery:
    """A publication's tensors as they arrive, counted when the model's loader reads them."""

    def __init__(self, manifest: WeightManifest, channel: Channel, device: torch.device) -> None:
        self.manifest = manifest
        self.channel = channel
        self.device = device
        self.hashes: list[int] = []
        self.loads: Counter[str] = Counter()
        self.stream = self._receive()

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield each weight's name and tensor, counting it when the loader requests it."""
        for name, tensor in self.stream:
            self.loads[name] += 1
            yield name, tensor

    def _receive(self) -> Iterator[NamedTensor]:
        for bucket in self.manifest.buckets():
            # Each bucket gets a new buffer.
            # vLLM keeps views of a buffer until a layer's last tensor has arrived.
            nbytes = bucket_nbytes(bucket)
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.channel.device)
            self.channel.receive(buffer)
            self.hashes.append(bucket_hash(buffer))
            yield from unpack(bucket, buffer.to(self.device))


class LoadReport(NamedTuple):
    """Model layers that a loader did not fill, and layers with a stale packed copy."""

    unwritten: Sequence[str]
    stale: Sequence[str]


class WeightReceiver(Membership):
    """The receiver of publications in one engine worker."""

    def receive(
        self,
        manifest: WeightManifest,
        device: torch.device,
        load: Callable[[Delivery], LoadReport],
    ) -> WorkerReceipt:
        """Let `load` read the tensors on `device`, and return the receipt.

        `load` reads `Delivery.tensors`. If `load` raises an error, the receiver leaves the group,
        so that the sender fails immediately instead of at its deadline.
        """
        with self.publishing() as channel:
            delivery = Delivery(manifest, channel, device)
            report = load(delivery)
            for _ in delivery.stream:
                pass  # tensors that the loader did not read
            sent = torch.empty(8 * len(delivery.hashes), dtype=torch.uint8, device=channel.device)
            channel.receive(sent)
        return WorkerReceipt(
            rank=self.rank,
            bucket_hashes=tuple(delivery.hashes),
            sent_hashes=tuple(sent.view(torch.int64).tolist()),
            loads=dict(delivery.loads),
            unwritten=report.unwritten,
            stale=report.stale,
        )
