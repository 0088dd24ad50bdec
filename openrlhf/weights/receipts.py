"""Receipts of engine workers, and their verification."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openrlhf.weights.manifest import PublicationError, WeightManifest


@dataclass(frozen=True, kw_only=True)
class WorkerReceipt:
    """The state of an engine worker after an update."""

    rank: int  # in the weight group
    bucket_hashes: tuple[int, ...]  # of the bytes that arrived
    sent_hashes: tuple[int, ...]  # from the sender's message after the last bucket
    loads: dict[str, int]  # tensor name → number of times the model's loader got the tensor
    unwritten: tuple[str, ...]  # layers of the engine without all new values, with counts
    stale: tuple[
        str, ...
    ]  # layers that compute with a packed copy of their weights (on a CPU), which is old


def verify_receipts(
    manifest: WeightManifest, engine: int, workers: Sequence[WorkerReceipt]
) -> None:
    """Raise PublicationError, naming the differences, unless each worker uses exactly the weights
    that were sent.

    Checked for each worker: the hash of every bucket, that each tensor was loaded exactly once,
    that no layer of the engine has old values, and that no packed copy of a weight is old.
    """
    if faults := [fault for worker in workers for fault in _faults(manifest, worker)]:
        raise PublicationError(
            f"engine {engine} does not hold version {manifest.version}: "
            + "; ".join(faults[:8])
            + (f"; and {len(faults) - 8} more differences" if len(faults) > 8 else "")
        )


def _faults(manifest: WeightManifest, worker: WorkerReceipt) -> Iterator[str]:
    where = f"worker {worker.rank}"
    for i, (ours, theirs) in enumerate(zip(worker.sent_hashes, worker.bucket_hashes, strict=True)):
        if ours != theirs:
            yield f"{where} has hash {theirs:#x} for bucket {i}, sent was {ours:#x}"
    expected = {spec.name: 1 for spec in manifest.specs}
    for name in expected | worker.loads:
        if (times := worker.loads.get(name, 0)) != expected.get(name, 0):
            yield f"{where} loaded {name} {times} times"
    yield from (f"{where} has old values in {layer}" for layer in worker.unwritten)
    yield from (f"{where} did not re-pack {layer}" for layer in worker.stale)
