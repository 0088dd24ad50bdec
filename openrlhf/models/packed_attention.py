"""Attention over packed rows without the flash-attn package.

On a GPU, PyTorch's own FlashAttention is used. Elsewhere, each document gets its own
scaled-dot-product call.

The function is registered with Transformers under a name that is absent from the mask registry, so
that no mask is built. The document boundaries are passed through the keyword arguments of
`model.forward`. The cost is the sum of the documents' costs, not that of a single sequence of the
row's length.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from openrlhf.models.ring_attention import RingRow, flash_computes, kernel_dtype, ring_attention
from openrlhf.models.shared_prefixes import sharing

NAME = "packed_sdpa"
FLASH = "flash_attention_2"
# PyTorch 2.11 accepts fewer key heads than query heads without this argument.
GROUPED: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    GROUPED["enable_gqa"] = True


class UnsupportedAttentionError(ValueError):
    """Error for an attention variant that packed SDPA does not support; its message says why."""


def packed_sdpa(
    module: nn.Module,
    query: Tensor,  # (1, H, N, D)
    key: Tensor,  # (1, H_kv, N, D)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: Sequence[int] | None = None,
    ring_row: RingRow | None = None,
    document_offsets: Tensor | None = None,  # (B + 1,) int32
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each document of a packed row.

    Returns (1, N, H, D). Raises UnsupportedAttentionError for attention variants that plain
    scaled-dot-product attention would silently compute incorrectly, and for layers that do not pass
    on the document boundaries.
    """
    if document_lengths is None and ring_row is None:
        raise UnsupportedAttentionError(
            "its attention layers do not pass keyword arguments to the attention function, which "
            "therefore does not receive the boundaries of packed sequences"
        )
    for variant in ("softcap", "s_aux"):
        if kwargs.get(variant) is not None:
            raise UnsupportedAttentionError(
                f"its attention uses `{variant}`, which packed SDPA does not support "
                "(--ds.attn_implementation flash_attention_2 supports it on a GPU)"
            )
    if ring_row is not None:
        attended = ring_attention(query, key, value, ring_row, scale=scaling, window=sliding_window)
        return attended.transpose(1, 2), None
    assert document_lengths is not None
    if document_offsets is not None and dropout == 0 and flash_computes(query, value):
        offsets = document_offsets.to(query.device)  # the model's layers may be on several GPUs
        longest = max(document_lengths)
        flash: Any = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            offsets,
            offsets,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            **GROUPED,
        )
        return flash[None], None
    attended = _attend_to_documents(
        query, key, value, list(document_lengths), dropout, scaling, sliding_window
    )
    return attended, None


def _attend_to_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention for one document after another with PyTorch's SDPA.

    Returns (1, N, H, D).
    """
    grouped = query.shape[1] != key.shape[1]
    dtype = kernel_dtype(query)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _window_mask(q.shape[2], window, q.device)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )

    documents = (states.to(dtype).split(lengths, 2) for states in (query, key, value))
    # Keep the parts out of a variable so that they are freed before the conversion.
    return torch.cat(list(map(attend, *documents)), 2).transpose(1, 2).to(query.dtype)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the causal mask for a sliding window, or None if the document fits in the window."""
    if window is None or length <= window:
        return None
    steps = torch.arange(length, device=device)
    distance = steps[:, None] - steps[None, :]
    return (distance >= 0) & (distance < window)


@contextmanager
def unpacked(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with packed attention accept plain sequences until the block exits."""
    was_packed = model.config._attn_implementation == NAME
    if was_packed:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if was_packed:
            model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, sharing(packed_sdpa))
AttentionInterface.register(FLASH, sharing(AttentionInterface()[FLASH]))
