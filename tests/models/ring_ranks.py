"""Compares ring attention with dense float64 attention, on the four ranks of test_ring.py."""

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.models.ring_attention import RingRow, ring_attention
from openrlhf.ring import Ring

ROWS = ([64], [5, 40, 19], [3, 1, 2, 1, 9], [16] * 8, [1, 90, 2], [7])
WINDOWS = (None, 1, 6, 16, 1000)
HEADS = ((4, 2, 16, 16), (3, 1, 8, 12))  # query heads, key heads, key size, value size
Heads = tuple[int, int, int, int]
FLOAT32 = 5e-6  # maximum output error, and maximum gradient error relative to the largest gradient


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None
) -> Tensor:
    """Return softmax(q k / √D) v, computed with all scores in memory."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places = torch.arange(sum(lengths))
    distances = places[:, None] - places[None, :]
    visible = (documents[:, None] == documents[None, :]) & (distances >= 0)
    if window is not None:
        visible &= distances < window
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value


def compare(ring: Ring, lengths: list[int], window: int | None, heads: Heads) -> None:
    """Raise AssertionError if the outputs or gradients differ for any of this rank's tokens."""
    num_heads, num_key_heads, key_size, value_size = heads
    draw = torch.Generator().manual_seed(sum(lengths))

    def normal(count: int, size: int) -> Tensor:
        states = torch.randn(1, count, sum(lengths), size, dtype=torch.float64, generator=draw)
        return states.requires_grad_()

    states = (
        normal(num_heads, key_size),
        normal(num_key_heads, key_size),
        normal(num_key_heads, value_size),
    )
    weights = torch.randn(
        1, num_heads, sum(lengths), value_size, dtype=torch.float64, generator=draw
    )
    expected = dense_attention(*states, lengths, window)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), states)

    row = RingRow(ring, lengths)
    places = row.places(torch.device("cpu"))
    real = places < sum(lengths)

    def own(whole: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(whole.detach(), (0, 0, 0, row.padding))
        return padded[:, :, places].float()

    query, key, value = (own(state).requires_grad_() for state in states)
    parts = (query, key, value)
    output = ring_attention(query, key, value, row, window=window)
    gradients = torch.autograd.grad((output * own(weights)).sum(), parts)
    case = f"ring of {ring.size}, documents {lengths}, window {window}, heads {heads}"
    for name, found, whole in zip(
        ("output", "dq", "dk", "dv"),
        (output, *gradients),
        (expected, *expected_gradients),
        strict=True,
    ):
        gap = (found - own(whole))[:, :, real].abs().max().item() if real.any() else 0.0
        assert gap <= FLOAT32 * max(1.0, float(whole.abs().max())), f"{case}: {name} {gap:.1e}"


def main() -> None:
    """Compare all cases on rings of one, two and four ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size in (1, 2, 4):
        for first in range(0, 4, size):
            ranks = tuple(range(first, first + size))
            group = dist.new_group(list(ranks))
            if rank not in ranks:
                continue
            assert isinstance(group, dist.ProcessGroup)
            ring = Ring(group=group, ranks=ranks, rank=rank - first)
            for lengths, window, heads in product(ROWS, WINDOWS, HEADS):
                compare(ring, lengths, window, heads)


if __name__ == "__main__":
    main()
