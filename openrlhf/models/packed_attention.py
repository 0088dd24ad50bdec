"""Attention over packed rows without FlashAttention: one scaled-dot-product call per document.

The function is registered with Transformers under a name that the mask registry does not know, so
that no mask is built. The lengths of the documents travel through the keyword arguments of
`model.forward`. The cost is the sum of the costs of the documents, not the cost of the whole row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from openrlhf.models.shared_prefixes import sharing

NAME, FLASH = "packed_sdpa", "flash_attention_2"


class UnsupportedAttentionError(ValueError):
    """A model's attention cannot be computed for packed rows here; the message says why."""


def packed_sdpa(
    module: nn.Module,
    query: Tensor,  # (1, H, N, D)
    key: Tensor,  # (1, H_kv, N, D)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: Sequence[int] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of a packed row. Returns (1, N, H, D).

    Raises UnsupportedAttentionError for attention variants that plain scaled-dot-product attention
    would silently compute wrongly, and for layers that do not pass on where the documents begin.
    """
    if document_lengths is None:
        raise UnsupportedAttentionError(
            "its attention layers do not pass keyword arguments to the attention function, so the boundaries of packed "
            "sequences do not reach it"
        )
    for variant in ("softcap", "s_aux"):
        if kwargs.get(variant) is not None:
            raise UnsupportedAttentionError(
                f"its attention uses `{variant}`, which packed SDPA does not compute "
                "(--ds.attn_implementation flash_attention_2 does, on a GPU)"
            )
    lengths, grouped = list(document_lengths), query.shape[1] != key.shape[1]
    # PyTorch's attention for CPUs takes half the time in float32 that it takes in bfloat16.
    dtype = query.dtype if query.is_cuda else torch.promote_types(query.dtype, torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _window_mask(q.shape[2], sliding_window, q.device)
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

    parts = (each.to(dtype).split(lengths, 2) for each in (query, key, value))
    return torch.cat(list(map(attend, *parts)), 2).transpose(1, 2).to(query.dtype), None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The causal band of sliding-window attention, if the document is longer than the window."""
    if window is None or length <= window:
        return None
    steps = torch.arange(length, device=device)
    distance = steps[:, None] - steps[None, :]
    return (distance >= 0) & (distance < window)


@contextmanager
def unpacked(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with packed attention compute plain sequences until the block exits."""
    ours = model.config._attn_implementation == NAME
    if ours:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if ours:
            model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, sharing(packed_sdpa))
AttentionInterface.register(FLASH, sharing(AttentionInterface()[FLASH]))
