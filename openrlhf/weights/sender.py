"""The trainer's half of a publication."""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from openrlhf.weights.buckets import bucket_hash, bucket_nbytes, pack
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.transport import Channel, Membership


class WeightSender(Membership):
    """The trainer's half of a publication: sends tensors to the engines, bucket by bucket."""

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send `tensors` (name, full tensor) in the manifest's order, each read before the next.

        Raises PublicationError if a member is lost, and ValueError if the tensors differ from the
        manifest. In both cases the sender leaves the group, so that the engines fail at once. The
        engines stay paused until a new group sends everything again.
        """
        if self.channel is None:
            raise PublicationError(
                f"version {manifest.version} cannot be sent: the sender has not joined a group"
            )
        try:
            hashes = tuple(self._send_buckets(self.channel, manifest, iter(tensors)))
            self.channel.send(torch.tensor(hashes, device=self.channel.device).view(torch.uint8))
        except BaseException:
            self.leave()
            raise

    def _send_buckets(
        self, channel: Channel, manifest: WeightManifest, stream: Iterator[tuple[str, Tensor]]
    ) -> Iterator[int]:
        buckets = manifest.buckets()
        buffer = torch.empty(
            max(map(bucket_nbytes, buckets)), dtype=torch.uint8, device=channel.device
        )
        for bucket in buckets:
            packed = buffer[: bucket_nbytes(bucket)]
            pack(bucket, islice(stream, len(bucket)), packed)
            yield bucket_hash(packed)
            channel.send(packed)
        if (extra := next(stream, None)) is not None:
            raise ValueError(f"the model has {extra[0]}, which is not in the manifest")
