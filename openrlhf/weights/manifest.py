"""A publication's manifest, which lists the tensors to be sent from the trainer to the engines."""

from dataclasses import dataclass
from typing import Any

from openrlhf.config.flags import UserError
from openrlhf.weights.buckets import Bucket, TensorSpec, bucket_nbytes, cut_into_buckets


class PublicationError(UserError, RuntimeError):
    """Error for a weight version that did not fully reach an engine and is not served."""


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """A publication's tensors in the order in which they are sent."""

    version: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    adapter: dict[str, Any] | None = None  # PEFT's settings, if the tensors belong to an adapter

    def buckets(self) -> list[Bucket]:
        """Return the tensors in buckets, which are the same for the trainer and the engines."""
        return cut_into_buckets(self.specs, lambda spec: bucket_nbytes([spec]), self.bucket_bytes)
