"""Receipts: a matching receipt is accepted, and a receipt with any difference is rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openrlhf.weights.buckets import TensorSpec
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import WorkerReceipt, verify_receipts

MANIFEST = WeightManifest(
    version=3,
    specs=tuple(TensorSpec(name=n, dtype=torch.float32, shape=(4,)) for n in ("a", "b")),
    bucket_bytes=16,
)
GOOD = WorkerReceipt(
    rank=1,
    bucket_hashes=(11, -12),
    sent_hashes=(11, -12),
    loads={"a": 1, "b": 1},
    unwritten=(),
    stale=(),
)


def test_receipts_that_match_the_manifest_are_accepted() -> None:
    verify_receipts(MANIFEST, 0, (GOOD, replace(GOOD, rank=2)))


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"bucket_hashes": (11, 12)}, "worker 2 .*bucket 1 .* 0xc .* -0xc"),
        ({"bucket_hashes": (-12, 11)}, "bucket 0"),
        ({"loads": {"a": 1}}, "worker 2 .*b 0 times"),
        ({"loads": {"a": 2, "b": 1}}, "worker 2 .*a 2 times"),
        ({"loads": {"a": 1, "b": 1, "c": 1}}, "worker 2 .*c 1 times"),
        ({"unwritten": ("qkv (4 of 12)",)}, r"worker 2 .*stale values.* qkv \(4 of 12\)"),
        ({"stale": ("lm_head",)}, "worker 2 .*repack.* lm_head"),
    ],
)
def test_receipt_error_names_the_worker_and_the_difference(difference: dict, message: str) -> None:
    bad = replace(GOOD, rank=2, **difference)
    with pytest.raises(PublicationError, match=f"engine 7 .*version 3: .*{message}"):
        verify_receipts(MANIFEST, 7, (GOOD, bad))


def test_receipt_error_lists_eight_differences_and_counts_all() -> None:
    bad = replace(GOOD, stale=tuple(f"layer{i}" for i in range(20)))
    with pytest.raises(PublicationError, match=r"layer7 \(20 differences\)") as raised:
        verify_receipts(MANIFEST, 0, (bad,))
    assert "layer8" not in str(raised.value)
