"""Buckets: grouping, packing, unpacking and hashing of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.weights.buckets import (
    BLOCKS_AT_ONCE,
    HASH_BLOCK,
    TensorSpec,
    bucket_hash,
    bucket_nbytes,
    cut_into_buckets,
    pack,
    unpack,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
SPECS = st.lists(
    st.builds(
        lambda dtype, shape: TensorSpec(name="", dtype=dtype, shape=tuple(shape)),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 7), max_size=3),
    ),
    max_size=12,
).map(lambda specs: [replace(spec, name=f"t{i}") for i, spec in enumerate(specs)])


def reference_hash(data: bytes) -> int:
    """Compute the `bucket_hash` formula with Python integers."""

    def weight(i: int) -> int:
        x = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return (x ^ (x >> 31)) | 1

    def block(words: list[int]) -> int:
        if len(words) > HASH_BLOCK:
            return block(
                [block(words[i : i + HASH_BLOCK]) for i in range(0, len(words), HASH_BLOCK)]
            )
        total = sum((w + (w >> 32)) * weight(i) for i, w in enumerate(words)) % 2**64
        return total - 2**64 if total >= 2**63 else total

    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    return block(words)


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)


def plan_buckets(specs: list[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    return cut_into_buckets(specs, lambda spec: bucket_nbytes([spec]), limit)


class TestPlan:
    @given(SPECS, st.integers(0, 600))
    def test_buckets_keep_the_tensor_order_and_respect_the_size_limit(self, specs, limit):
        buckets = plan_buckets(specs, limit)
        assert [spec for bucket in buckets for spec in bucket] == specs
        assert all(len(bucket) == 1 or bucket_nbytes(bucket) <= limit for bucket in buckets)

    def test_adjacent_tensors_share_a_bucket_up_to_the_limit(self):
        # each tensor has 16 bytes
        specs = [TensorSpec(name=n, dtype=torch.float32, shape=(4,)) for n in "abcde"]
        assert [len(bucket) for bucket in plan_buckets(specs, 32)] == [2, 2, 1]

    def test_tensor_over_the_limit_gets_its_own_bucket(self):
        sizes = {"a": 1, "b": 100, "c": 1}
        specs = [TensorSpec(name=n, dtype=torch.float32, shape=(k,)) for n, k in sizes.items()]
        buckets = plan_buckets(specs, 64)
        assert [[spec.name for spec in bucket] for bucket in buckets] == [["a"], ["b"], ["c"]]


class TestPacking:
    @given(SPECS)
    def test_unpack_returns_the_packed_tensors(self, specs):
        tensors = [torch.randn(spec.shape).mul(9).to(spec.dtype) for spec in specs]
        buffer = torch.empty(bucket_nbytes(specs), dtype=torch.uint8)
        pack(specs, zip([spec.name for spec in specs], tensors, strict=True), buffer)
        out = dict(unpack(specs, buffer))
        assert list(out) == [spec.name for spec in specs]
        assert all(torch.equal(out[s.name], t) for s, t in zip(specs, tensors, strict=True))

    def test_pack_casts_tensors_to_the_dtype_of_their_specs(self):
        bucket = [TensorSpec(name="w", dtype=torch.bfloat16, shape=(2,))]
        buffer = torch.empty(bucket_nbytes(bucket), dtype=torch.uint8)
        pack(bucket, [("w", torch.tensor([1.0, 1.001], requires_grad=True))], buffer)
        [(_, out)] = unpack(bucket, buffer)
        assert out.dtype is torch.bfloat16 and out.tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(("name", "size"), [("w", 1), ("v", 4)])
    def test_pack_rejects_a_tensor_with_a_different_name_or_shape(self, name, size):
        bucket = [TensorSpec(name="w", dtype=torch.float32, shape=(4,))]
        with pytest.raises(
            ValueError, match=rf"the manifest has w \(4,\), but the model has {name} \({size},\)"
        ):
            pack(bucket, [(name, torch.zeros(size))], torch.empty(16, dtype=torch.uint8))

    @pytest.mark.parametrize("count", [0, 2])
    def test_pack_rejects_a_different_number_of_tensors(self, count):
        bucket = [TensorSpec(name="w", dtype=torch.float32, shape=(4,))]
        with pytest.raises(ValueError, match="zip"):
            pack(bucket, [("w", torch.zeros(4))] * count, torch.empty(16, dtype=torch.uint8))


class TestHash:
    @settings(max_examples=30, deadline=None)
    @given(st.binary(max_size=400).map(lambda data: data[: len(data) // 8 * 8]))
    def test_hash_matches_the_formula(self, data):
        assert bucket_hash(torch.tensor(list(data), dtype=torch.uint8)) == reference_hash(data)

    def test_hash_matches_the_formula_over_several_blocks(self):
        data = random_bytes(8 * (2 * HASH_BLOCK + 3))
        assert bucket_hash(data) == reference_hash(data.numpy().tobytes())

    @pytest.mark.parametrize("at_once", [1, 2, 64])
    def test_hash_does_not_depend_on_the_number_of_blocks_computed_at_once(
        self, monkeypatch, at_once
    ):
        data = random_bytes(8 * (5 * HASH_BLOCK + 3))
        expected = bucket_hash(data)
        monkeypatch.setitem(BLOCKS_AT_ONCE, "cpu", at_once)
        assert bucket_hash(data) == expected

    def test_any_flipped_bit_changes_the_hash(self):
        data = random_bytes(64)
        before = bucket_hash(data)
        for i in range(64 * 8):
            data[i // 8] ^= 1 << i % 8
            assert bucket_hash(data) != before
            data[i // 8] ^= 1 << i % 8

    def test_negating_two_values_changes_the_hash(self):
        """The sign bits of odd values are the highest bits of words.

        Without the shift in the formula, the two sign bits would cancel out.
        """
        values = torch.randn(64)
        before = bucket_hash(values.view(torch.uint8))
        for first, second in ((1, 3), (0, 1), (2, 63)):
            changed = values.clone()
            changed[[first, second]] *= -1
            assert bucket_hash(changed.view(torch.uint8)) != before

    @pytest.mark.parametrize("size", [4096, 8 * (HASH_BLOCK + 512)])
    def test_swapping_or_shifting_values_changes_the_hash(self, size):
        data = random_bytes(size)
        swapped = data.clone()
        swapped[:8] = data[-8:]
        swapped[-8:] = data[:8]
        halves = torch.cat([data[size // 2 :], data[: size // 2]])
        hashes = [bucket_hash(d) for d in (data, swapped, halves, data.roll(8), data.roll(1))]
        assert len(set(hashes)) == 5

    def test_2000_similar_buckets_have_different_hashes(self):
        data = random_bytes(1024)
        hashes = set()
        for i in range(2000):
            data[i % 1024] += 1
            hashes.add(bucket_hash(data))
        assert len(hashes) == 2000
