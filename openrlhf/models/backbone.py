"""The decoder under a head, run over flat tokens: one packed row, or a right-padded block."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openrlhf.experience import Layout
from openrlhf.models import packed_attention


def hidden_states(
    decoder: Any, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"], *, packing: bool
) -> Float[Tensor, "N H"]:
    """The last hidden state of every token; no sequence sees another, and the way they are laid out changes no number.

    `decoder` is a Transformers model without its head. `packing`: all sequences as one row without padding.
    """
    lengths = offsets.diff()
    positions = torch.arange(len(tokens), device=tokens.device)
    positions = positions - offsets[:-1].repeat_interleave(lengths)
    if packing:
        return decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,  # with a cache, or any mask, documents would attend to each other
            **_document_arguments(offsets, decoder.config._attn_implementation),
        ).last_hidden_state[0]
    layout = Layout.of(offsets)
    states = decoder(
        input_ids=layout.gather(tokens),
        attention_mask=layout.real.long(),
        position_ids=layout.gather(positions),
        use_cache=False,
    ).last_hidden_state
    return states[layout.real]


def _document_arguments(offsets: Tensor, attention: str) -> dict[str, Any]:
    """Where the documents of a packed row lie, in the words of the attention in use."""
    lengths = offsets.diff()
    if attention == packed_attention.NAME:
        return {"document_lengths": lengths.tolist()}
    cumulative, longest = offsets.int(), int(lengths.max())
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}
