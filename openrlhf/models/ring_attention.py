"""Ring attention: causal attention over a packed row shared by several ranks.

Each rank holds a part of the row. Keys and values travel around the ring, moving to the next rank
in each round, and every rank attends from its own tokens to the keys that it currently holds.
Partial results are combined by their log-sum-exp, so no rank ever holds the scores or keys of the
entire row.

Liu et al. 2023, arXiv:2310.01889. The row is cut into 2·size chunks, and rank r holds chunks r and
2·size − 1 − r, so that a long document costs the same on every rank.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openrlhf.ring import Ring

CHUNKS_PER_RANK = 2
WIDEST_HEAD = 256  # largest head size of FlashAttention's kernels
OLDEST_GPU = (8, 0)  # CUDA compute capability that FlashAttention's kernels require
aten: Any = torch.ops.aten


class Block(NamedTuple):
    """Queries and keys of one document that meet on a rank, as indices into the ranks' parts."""

    queries: slice
    keys: slice
    causal: bool  # True for a square on the diagonal; if False, all keys come before all queries
    distance: int = 0  # distance of the first query from the first key, in tokens
    window: int | None = None  # keys at this distance or beyond are hidden

    def mask(self, like: Tensor) -> Tensor | None:
        """Return a mask (0 for visible, −inf for hidden keys), or None if all keys are visible."""
        if self.window is None:
            return None
        queries = torch.arange(self.queries.stop - self.queries.start, device=like.device)
        keys = torch.arange(self.keys.stop - self.keys.start, device=like.device)
        distances = self.distance + queries[:, None] - keys[None, :]
        hidden = distances >= self.window
        return like.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))


class RingRow:
    """A packed row that is divided over the ranks of a ring.

    The row is padded to a multiple of 2·size tokens; the padding is a document of its own.
    """

    def __init__(self, ring: Ring, lengths: Sequence[int]) -> None:
        self.ring = ring
        self.num_tokens = sum(lengths)
        self.padding = -self.num_tokens % (CHUNKS_PER_RANK * ring.size)
        documents = [length for length in (*lengths, self.padding) if length]
        self.borders = (0, *accumulate(documents))  # start of each document, and the end of the row
        self.chunk = (self.num_tokens + self.padding) // (CHUNKS_PER_RANK * ring.size)
        self.blocks = lru_cache(maxsize=None)(self._find_blocks)

    def chunk_starts(self, rank: int) -> tuple[int, int]:
        """Return the positions in the row at which a rank's chunks begin."""
        last = CHUNKS_PER_RANK * self.ring.size - 1
        return rank * self.chunk, (last - rank) * self.chunk

    def places(self, device: torch.device) -> Int[Tensor, " n"]:
        """Return the positions of this rank's tokens in the padded row, in ascending order."""
        steps = torch.arange(self.chunk, device=device)
        return torch.cat([start + steps for start in self.chunk_starts(self.ring.rank)])

    def own_part(self, row: Int[Tensor, " N"]) -> Int[Tensor, " n"]:
        """Return this rank's part of a row of per-token numbers. Padding tokens get 0."""
        padded = torch.nn.functional.pad(row, (0, self.padding))
        return padded[self.places(row.device)]

    def _find_blocks(self, source: int, window: int | None) -> list[Block]:
        """Return the blocks of this rank's queries and the keys of rank `source`."""
        found: list[Block] = []
        for query_number, query_start in enumerate(self.chunk_starts(self.ring.rank)):
            for key_number, key_start in enumerate(self.chunk_starts(source)):
                if key_start > query_start:
                    continue
                to_own_queries = query_number * self.chunk - query_start
                to_own_keys = key_number * self.chunk - key_start
                for piece in self._pieces(query_start, key_start, window):
                    queries, keys = piece.queries, piece.keys
                    found.append(
                        piece._replace(
                            queries=_moved(queries, to_own_queries),
                            keys=_moved(keys, to_own_keys),
                        )
                    )
        return found

    def _pieces(self, query_start: int, key_start: int, window: int | None) -> Iterator[Block]:
        """Yield the blocks of a chunk's queries and the keys of the same or an earlier chunk."""
        document = bisect_right(self.borders, query_start) - 1
        for begin, end in pairwise(self.borders[document:]):
            if begin >= query_start + self.chunk:
                return
            queries = slice(max(begin, query_start), min(end, query_start + self.chunk))
            keys = slice(max(begin, key_start), min(end, key_start + self.chunk))
            if queries == keys:
                yield from _squares(queries, window)
            elif keys.start < keys.stop:
                yield from _rectangle(queries, keys, window)


def _squares(span: slice, window: int | None) -> Iterator[Block]:
    """Yield the blocks of a document inside a chunk: a causal square.

    With a window, the document is cut into squares as wide as the window. Each square also attends
    to the preceding square.
    """
    width = window or span.stop - span.start
    for begin in range(span.start, span.stop, width):
        square = slice(begin, min(span.stop, begin + width))
        yield Block(square, square, causal=True)
        if begin > span.start:
            yield from _rectangle(square, slice(begin - width, begin), window)


def _moved(places: slice, by: int) -> slice:
    return slice(places.start + by, places.stop + by)


def _rectangle(queries: slice, keys: slice, window: int | None) -> Iterator[Block]:
    """Yield the block of queries and earlier keys, except those that the window hides entirely."""
    if window is None:
        yield Block(queries, keys, causal=False)
        return
    # Every remaining query attends to the last key, and the first query attends to every key.
    # Otherwise, kernels would return no log-sum-exp for queries that attend to no key.
    queries = slice(queries.start, min(queries.stop, keys.stop - 1 + window))
    keys = slice(max(keys.start, queries.start - window + 1), keys.stop)
    if queries.start >= queries.stop or keys.start >= keys.stop:
        return
    farthest = queries.stop - 1 - keys.start
    yield Block(
        queries,
        keys,
        causal=False,
        distance=queries.start - keys.start,
        window=window if farthest >= window else None,
    )


def ring_attention(
    query: Float[Tensor, "1 H n D"],
    key: Float[Tensor, "1 H_kv n D"],
    value: Float[Tensor, "1 H_kv n D_v"],
    row: RingRow,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "1 H n D_v"]:
    """Compute causal attention inside each document of a row.

    All ranks of the row's ring must call this function. With `window`, a token attends to itself
    and the window − 1 tokens before it.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    attended: Any = _RingAttention.apply(query, key, value, row, scale, window)
    return attended


class _RingAttention(torch.autograd.Function):
    """Autograd function. Queries that share keys have two head axes: (H_kv, H // H_kv, n, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: RingRow,
        scale: float,
        window: int | None,
    ) -> Tensor:
        dtype = kernel_dtype(query)
        grouped = _grouped(query, key, dtype)
        shape = (*grouped.shape[:-1], value.shape[-1])
        output = query.new_zeros(shape, dtype=torch.float32)
        lse = query.new_full(shape[:-1], float("-inf"), dtype=torch.float32)
        for turn, held in _travelling(row.ring, torch.cat([key[0], value[0]], -1)):
            keys, values = held.to(dtype).split([key.shape[-1], value.shape[-1]], -1)
            for block in row.blocks(row.ring.source(turn), window):
                partial, partial_lse = _attend(
                    grouped[:, :, block.queries], keys[:, block.keys], values[:, block.keys],
                    block, scale,
                )  # fmt: skip
                before = lse[:, :, block.queries]
                combined = torch.logaddexp(before, partial_lse)
                kept = (before - combined).exp()[..., None]
                added = (partial_lse - combined).exp()[..., None]
                output[:, :, block.queries] = output[:, :, block.queries] * kept + partial * added
                lse[:, :, block.queries] = combined
        output = output.to(dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.row, ctx.scale, ctx.window = row, scale, window
        return output.flatten(0, 1)[None].to(query.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        row: RingRow = ctx.row
        dtype = output.dtype
        grouped = _grouped(query, key, dtype)
        of_output = _grouped(gradient, key, dtype)
        of_query = torch.zeros_like(grouped, dtype=torch.float32)
        sizes = [key.shape[-1], value.shape[-1]]
        packed = torch.cat([key[0], value[0]], -1)
        # The gradient of a rank's keys travels with the keys.
        # After `size` shifts, the gradient is back on that rank.
        of_held = torch.zeros_like(packed, dtype=torch.float32)
        for turn, held in _travelling(row.ring, packed):
            if turn:
                of_held = _shifted(row.ring, of_held)
            keys, values = held.to(dtype).split(sizes, -1)
            of_keys, of_values = of_held.split(sizes, -1)
            for block in row.blocks(row.ring.source(turn), ctx.window):
                queries = block.queries
                parts = _attend_backward(
                    of_output[:, :, queries], grouped[:, :, queries],
                    keys[:, block.keys], values[:, block.keys],
                    output[:, :, queries], lse[:, :, queries], block, ctx.scale,
                )  # fmt: skip
                of_query[:, :, queries] += parts[0]
                of_keys[:, block.keys] += parts[1]
                of_values[:, block.keys] += parts[2]
        of_key, of_value = _shifted(row.ring, of_held).split(sizes, -1)
        return (
            of_query.flatten(0, 1)[None].to(query.dtype),
            of_key[None].to(key.dtype),
            of_value[None].to(value.dtype),
            None,
            None,
            None,
        )


def _grouped(states: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Return states (1, H, n, D) with two head axes: (H_kv, H // H_kv, n, D)."""
    return states[0].unflatten(0, (key.shape[1], -1)).to(dtype)


def _travelling(ring: Ring, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the block that this rank holds in each round, while the next block is arriving."""
    held = block.contiguous()
    last = ring.size - 1
    for turn in range(last):
        following, requests = ring.shift(held)
        yield turn, held
        for request in requests:
            request.wait()
        held = following
    yield last, held


def _shifted(ring: Ring, block: Tensor) -> Tensor:
    if ring.size == 1:
        return block
    received, requests = ring.shift(block)
    for request in requests:
        request.wait()
    return received


def kernel_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype to compute attention in. On a CPU, float32 halves the kernels' run time."""
    if states.is_cuda:
        return states.dtype
    return torch.promote_types(states.dtype, torch.float32)


# ---- one block: (G, R, t, D) queries, (G, s, D) keys and (G, s, D_v) values


def _attend(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention output of a block, (G, R, t, D_v), and the log-sum-exp of its scores."""
    mask = block.mask(query)
    if not _has_kernel(query, value, mask):
        scores = _scores(query, key, block, scale, mask)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        return torch.einsum("grts,gsd->grtd", weights, value.float()), lse
    keys, values = _repeated(key, query), _repeated(value, query)
    if query.is_cuda:
        results = aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, block.causal, scale=scale
        )
        return results[0].float(), results[1]
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, block.causal, attn_mask=mask, scale=scale
    )


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to the queries, keys and values of one block.

    `output` and `lse` are the queries' results over all keys, not only over the block's keys.
    """
    mask = block.mask(query)
    if not _has_kernel(query, value, mask):
        weights = (_scores(query, key, block, scale, mask) - lse[..., None]).exp()
        of_output = gradient.float()
        of_weights = torch.einsum("grtd,gsd->grts", of_output, value.float())
        delta = (of_output * output.float()).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - delta) * scale
        return (
            torch.einsum("grts,gsd->grtd", of_scores, key.float()),
            torch.einsum("grts,grtd->gsd", of_scores, query.float()),
            torch.einsum("grts,grtd->gsd", weights, of_output),
        )
    keys, values = _repeated(key, query), _repeated(value, query)
    if query.is_cuda:
        # unused argument in place of the dropout seed
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        of_query, of_keys, of_values = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, keys, values, output, lse.contiguous(), None, None,
            query.shape[2], keys.shape[2], 0.0, block.causal, unused, unused, scale=scale,
        )  # fmt: skip
    else:
        of_query, of_keys, of_values = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, keys, values, output, lse, 0.0, block.causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    return of_query.float(), of_keys.float().sum(1), of_values.float().sum(1)


def _has_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if query.is_cuda:
        return mask is None and flash_computes(query, value)
    return query.shape[-1] == value.shape[-1]


def flash_computes(query: Tensor, value: Tensor) -> bool:
    """Return whether PyTorch's FlashAttention supports this head size on this GPU."""
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < OLDEST_GPU:
        return False
    head_dim = query.shape[-1]
    fits = head_dim == value.shape[-1] and head_dim % 8 == 0 and head_dim <= WIDEST_HEAD
    return fits and query.dtype in (torch.bfloat16, torch.float16)


def _repeated(states: Tensor, query: Tensor) -> Tensor:
    """Return keys or values, repeated for each query head that shares them, without copying."""
    return states[:, None].expand(-1, query.shape[1], -1, -1)


def _scores(query: Tensor, key: Tensor, block: Block, scale: float, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("grtd,gsd->grts", query.float(), key.float()) * scale
    if mask is not None:
        scores = scores + mask
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores
