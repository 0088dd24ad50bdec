"""Buckets: tensors that are grouped up to a size limit, packed into bytes, and hashed."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

T = TypeVar("T")
# Every tensor starts at a multiple of this number of bytes, so any dtype can be viewed in place.
ALIGNMENT = 16
HASH_BLOCK = 2**16  # in 8-byte words; a block of half a megabyte fits in a CPU core's cache
# Number of blocks to hash at once.
# Hashing one block at a time would launch thousands of small GPU kernels per GiB.
BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 64}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor's name in the model's checkpoint, its dtype during transport, and its full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Bucket = list[TensorSpec]
NamedTensor = tuple[str, Tensor]


def cut_into_buckets(
    items: Iterable[T], size: Callable[[T], int], bucket_bytes: int
) -> list[list[T]]:
    """Split `items`, in order, into buckets of at most `bucket_bytes`.

    A larger item gets a bucket of its own.
    """
    buckets: list[list[T]] = []
    room = -1
    for item in items:
        if size(item) > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(item)
        room -= size(item)
    return buckets


def bucket_nbytes(bucket: Bucket) -> int:
    """Return the size of a packed bucket in bytes, a multiple of 16."""
    return sum(_aligned(spec.nbytes) for spec in bucket)


def pack(bucket: Bucket, tensors: Iterable[NamedTensor], buffer: Tensor) -> None:
    """Copy the tensors into `buffer` (uint8) one after another, cast to their specs' dtypes.

    Raises ValueError if a tensor's name or shape differs from its spec, or if there are fewer
    tensors than specs.
    """
    for (spec, view), (name, tensor) in zip(_views(bucket, buffer), tensors, strict=True):
        shape = tuple(tensor.shape)
        if (name, shape) != (spec.name, spec.shape):
            raise ValueError(
                f"the manifest has {spec.name} {spec.shape}, but the model has {name} {shape}"
            )
        view.copy_(tensor.detach())


def unpack(bucket: Bucket, buffer: Tensor) -> Iterator[NamedTensor]:
    """Yield the name and the tensor of every spec. The tensors are views of `buffer` (uint8)."""
    for spec, view in _views(bucket, buffer):
        yield spec.name, view


def bucket_hash(buffer: Tensor) -> int:
    """Return a 64-bit hash of `buffer`, computed on its device.

    The `buffer` has dtype uint8 and a length that is a multiple of 8 bytes. The hash of a block is
    H = Σ wᵢ·(xᵢ + xᵢ≫32) mod 2⁶⁴ over its 8-byte words xᵢ, with odd pseudo-random weights wᵢ
    (multilinear family, Carter and Wegman 1979). The hashes of the blocks are hashed again. Every
    position has a different weight, so the hash also detects swapped or shifted values. The
    probability of missing accidental corruption is about 2⁻³¹ per bucket. The weights are
    constants, so the hash does not protect against an adversary. The throughput is about 2 GB/s on
    one CPU core.
    """
    words = buffer.view(torch.int64)
    weights = _hash_weights(words.device)
    while True:
        words = _hash_blocks(words, weights)
        if len(words) == 1:
            return int(words)


def _hash_blocks(words: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each block of `words`; the last block may be shorter."""
    sums: list[Tensor] = []
    for chunk in words.split(BLOCKS_AT_ONCE[words.device.type] * HASH_BLOCK):
        if len(chunk) % HASH_BLOCK or not len(chunk):
            chunk = pad(chunk, (0, HASH_BLOCK - len(chunk) % HASH_BLOCK))
        blocks = chunk.view(-1, HASH_BLOCK)
        # The shift adds a word's high half to its low half.
        # In a product modulo 2⁶⁴, a factor's high bits affect only the high bits of the result.
        sums.append(((blocks + (blocks >> 32)) * weights).sum(dim=1))
    return torch.cat(sums)


@lru_cache(maxsize=8)
def _hash_weights(device: torch.device) -> Tensor:
    """Return the odd weights of a block: the splitmix64 sequence, the same in every process."""
    x = torch.arange(1, HASH_BLOCK + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x | 1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    start = 0
    for spec in bucket:
        end = start + spec.nbytes
        yield spec, buffer[start:end].view(spec.dtype).view(spec.shape)
        start += _aligned(spec.nbytes)
