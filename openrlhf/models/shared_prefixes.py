"""Sequences of a packed row that begin alike, such as the samples of a prompt: their common
beginning is computed once.

In a causal model, the states at a token depend on the tokens up to there and on nothing else. So
the layers see each distinct beginning once, and attention alone sees whole sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

# Tensor arguments of attention functions that have no effect, or that the functions use or reject.
KNOWN_TENSORS = {
    "attention_mask",
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "document_offsets",
    "s_aux",
}
WORTH = 0.05  # of the tokens: below this share, the copies cost more than is saved


@dataclass(frozen=True)
class SharedPrefixes:
    """The places of a packed row that are computed, and for each place the number of the computed
    place that equals it.

    Example: the sequences "abc" and "abd" have `computed` [0, 1, 2, 5] and `source` [0, 1, 2, 0, 1,
    3].
    """

    computed: Int[Tensor, " M"]
    source: Int[Tensor, " N"]

    @classmethod
    def of(cls, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]) -> Self | None:
        """What the sequences have in common; None if it is hardly anything."""
        flat, places = tokens.cpu().numpy(), np.arange(len(tokens))
        sequences = [slice(*ends) for ends in pairwise(offsets.tolist())]
        sequences.sort(
            key=lambda sequence: flat[sequence].tobytes()
        )  # each beside the one that it shares most with
        for one, other in pairwise(sequences):
            shorter = min(one.stop - one.start, other.stop - other.start)
            alike = (flat[one][:shorter] == flat[other][:shorter]).cumprod().sum()
            places[other][:alike] = places[one][:alike]
        computed, source = np.unique(places, return_inverse=True)
        if len(computed) > (1 - WORTH) * len(places):
            return None
        return cls(*(torch.from_numpy(each).to(tokens.device) for each in (computed, source)))


def sharing(attend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """An attention function of Transformers that takes rows with shared prefixes too: it then
    attends in the whole row.

    It raises ValueError for a tensor that it does not know, which may decide what a token sees.
    """

    @wraps(attend)
    def attend_in_whole_row(
        module: Any, *given: Any, shared_prefixes: SharedPrefixes | None = None, **options: Any
    ) -> tuple[Tensor, Any]:
        for name, value in options.items():
            if isinstance(value, Tensor) and name not in KNOWN_TENSORS:
                raise ValueError(
                    f"this model's attention depends on `{name}`, which {attend.__name__} would ignore"
                )
        if shared_prefixes is None:
            return attend(module, *given, **options)
        states, mask = (
            given[:3],
            given[3:],
        )  # query, key and value (1, H, M, D); the mask may be in `options`
        device = states[0].device  # a model may be spread over several GPUs
        whole = (each.index_select(2, shared_prefixes.source.to(device)) for each in states)
        attended, weights = attend(module, *whole, *mask, **options)  # (1, N, H, D)
        return attended.index_select(1, shared_prefixes.computed.to(device)), weights

    return attend_in_whole_row
