"""The sender, which is the trainer's half of a publication."""

from collections.abc import Iterable
from itertools import islice

import torch

from openrlhf.weights.buckets import NamedTensor, bucket_hash, bucket_nbytes, pack
from openrlhf.weights.manifest import WeightManifest
from openrlhf.weights.transport import Membership


class WeightSender(Membership):
    """The sender of tensors to the engines, bucket by bucket."""

    def send(self, manifest: WeightManifest, tensors: Iterable[NamedTensor]) -> None:
        """Send `tensors` (name, full tensor), read one at a time, in the manifest's order.

        Raises PublicationError if a member is lost, and ValueError if the tensors differ from the
        manifest. In either case, the sender leaves the group, so that the engines fail immediately.
        The engines stay paused until a new group sends everything again.
        """
        with self.publishing() as channel:
            stream = iter(tensors)
            buckets = manifest.buckets()
            largest = max(bucket_nbytes(bucket) for bucket in buckets)
            buffer = torch.empty(largest, dtype=torch.uint8, device=channel.device)
            hashes: list[int] = []
            for bucket in buckets:
                packed = buffer[: bucket_nbytes(bucket)]
                pack(bucket, islice(stream, len(bucket)), packed)
                hashes.append(bucket_hash(packed))
                channel.send(packed)
            extra = next(stream, None)
            if extra is not None:
                raise ValueError(f"the model has {extra[0]}, which is not in the manifest")
            channel.send(torch.tensor(hashes, device=channel.device).view(torch.uint8))
