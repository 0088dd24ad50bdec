"""Common prefixes of the sequences in a packed row, which are computed once.

Samples of the same prompt have a common prefix. In a causal model, a token's states depend only on
that token and the tokens before it. The layers therefore process each distinct prefix once, and
only attention operates on entire sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from openrlhf.algorithms.tensors import widened

# Tensor arguments that attention functions are known to use, to reject or to ignore.
KNOWN_TENSORS = {
    "attention_mask",
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "document_offsets",
    "s_aux",
}
# If the fraction of tokens saved is below this value, copying costs more than the layers save.
SMALLEST_SAVING = 0.05


@dataclass(frozen=True)
class SharedPrefixes:
    """The computed positions in a packed row, and the source of the states at each position.

    Example: for the sequences "abc" and "abd", `computed` is [0, 1, 2, 5] and `source` [0, 1, 2, 0,
    1, 3].
    """

    computed: Int[Tensor, " M"]
    source: Int[Tensor, " N"]

    @classmethod
    def of(cls, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]) -> Self | None:
        """Return the shared prefixes, or None if they are too short to be worthwhile."""
        flat = tokens.cpu().numpy()
        places = np.arange(len(tokens))
        sequences = [slice(start, stop) for start, stop in pairwise(offsets.tolist())]
        # Sorting puts each sequence next to the sequence with which it shares the longest prefix.
        sequences.sort(key=lambda sequence: flat[sequence].tobytes())
        for previous, sequence in pairwise(sequences):
            shorter = min(previous.stop - previous.start, sequence.stop - sequence.start)
            shared = (flat[previous][:shorter] == flat[sequence][:shorter]).cumprod().sum()
            places[sequence][:shared] = places[previous][:shared]
        computed, source = np.unique(places, return_inverse=True)
        if len(computed) > (1 - SMALLEST_SAVING) * len(places):
            return None
        return cls(
            computed=torch.from_numpy(computed).to(tokens.device),
            source=torch.from_numpy(source).to(tokens.device),
        )

    def expand(self, states: Float[Tensor, "1 H M D"]) -> Float[Tensor, "1 H N D"]:
        """Return the states at all positions.

        The gradients of a shared state are summed in at least float32.
        """
        source = self.source.to(states.device)  # a model may be spread over several GPUs
        expanded: Any = _Expanded.apply(states, source)
        return expanded


class _Expanded(torch.autograd.Function):
    """A selection of states whose gradients are added in float32 and rounded once.

    Autograd would round every partial sum: with 64 samples of a prompt in bfloat16, by 1 %.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.shape = states.shape
        return states.index_select(2, source)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        [source] = ctx.saved_tensors
        wide = widened(gradient)
        summed = wide.new_zeros(ctx.shape).index_add_(2, source, wide)
        return summed.to(gradient.dtype), None


def sharing(attend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Return a Transformers attention function that also accepts rows with shared prefixes.

    The returned function expands a row with shared prefixes, and computes attention over the
    expanded row. The returned function raises ValueError for an unknown tensor argument, which may
    determine what a token attends to.
    """

    @wraps(attend)
    def attend_in_whole_row(
        module: Any,
        query: Tensor,  # (1, H, M, D)
        key: Tensor,
        value: Tensor,
        *mask: Any,  # may be passed in `options` instead
        shared_prefixes: SharedPrefixes | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        for name, option in options.items():
            if isinstance(option, Tensor) and name not in KNOWN_TENSORS:
                raise ValueError(
                    f"this model's attention depends on `{name}`, which {attend.__name__} would "
                    "ignore"
                )
        if shared_prefixes is None:
            return attend(module, query, key, value, *mask, **options)
        whole = (shared_prefixes.expand(states) for states in (query, key, value))
        attended, weights = attend(module, *whole, *mask, **options)  # (1, N, H, D)
        return attended.index_select(1, shared_prefixes.computed.to(query.device)), weights

    return attend_in_whole_row
