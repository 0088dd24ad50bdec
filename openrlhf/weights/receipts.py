"""Engine workers' receipts, and the comparison of receipts with the sent weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openrlhf.weights.manifest import PublicationError, WeightManifest

NAMED_DIFFERENCES = 8  # maximum number of differences in an error message


@dataclass(frozen=True, kw_only=True)
class WorkerReceipt:
    """The state of an engine worker after an update."""

    rank: int  # rank in the weight group
    bucket_hashes: tuple[int, ...]  # hashes of the bytes that arrived
    sent_hashes: tuple[int, ...]  # hashes in the sender's message after the last bucket
    loads: dict[str, int]  # tensor name → number of times the model's loader received it
    unwritten: Sequence[str]  # engine layers that lack new values, with counts
    stale: Sequence[str]  # layers that use a stale packed copy of their weights (CPU)


def verify_receipts(
    manifest: WeightManifest, engine: int, receipts: Sequence[WorkerReceipt]
) -> None:
    """Raise PublicationError unless each worker uses exactly the weights that were sent.

    Checks for each worker that every bucket's hash matches, each tensor was loaded exactly once, no
    engine layer has stale values, and no packed copy of a weight is stale. The message names the
    first differences.
    """
    differences: list[str] = []
    for receipt in receipts:
        differences += _differences(manifest, receipt)
    if not differences:
        return
    reasons = "; ".join(differences[:NAMED_DIFFERENCES])
    raise PublicationError(
        f"engine {engine} failed to verify weight version {manifest.version}: {reasons} "
        f"({len(differences)} differences)"
    )


def _differences(manifest: WeightManifest, receipt: WorkerReceipt) -> Iterator[str]:
    worker = f"worker {receipt.rank}"
    hashes = zip(receipt.sent_hashes, receipt.bucket_hashes, strict=True)
    for bucket, (sent, arrived) in enumerate(hashes):
        if sent != arrived:
            yield f"{worker} received bucket {bucket} with hash {arrived:#x} instead of {sent:#x}"
    expected = {spec.name: 1 for spec in manifest.specs}
    for name in expected | receipt.loads:
        times = receipt.loads.get(name, 0)
        if times != expected.get(name, 0):
            yield f"{worker} loaded {name} {times} times"
    for layer in receipt.unwritten:
        yield f"{worker} has stale values in {layer}"
    for layer in receipt.stale:
        yield f"{worker} did not repack {layer}"
