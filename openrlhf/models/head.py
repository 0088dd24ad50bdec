"""A model's output layer.

It turns hidden states into log-probabilities, entropies, logits or values.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from openrlhf.algorithms.tensors import linear_logprobs, logit_logprobs, row_chunks


class OutputHead(nn.Module):
    """The output layer after the decoder: one linear layer, or an adapter around it.

    The layer may be tied to the embeddings. The layer is a submodule of the head, which reads its
    weight in its own forward pass, so that ZeRO 3 gathers the weight. With `precise`, the product
    is computed in float32 regardless of the weights' dtype, because rewards need more than 8 bits.
    """

    def __init__(self, layer: Any, *, precise: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.precise = precise

    def forward(
        self,
        hidden: Float[Tensor, "K H"],
        targets: Int[Tensor, " K"] | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        reduce: Callable[[Tensor, slice], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities (K,) of `targets`, and entropies in nats if `entropy` is set.

        Without `targets`, return the outputs (K, V) or, with `reduce`, the results of applying
        `reduce` to each chunk of outputs.

        For log-probabilities, only one chunk of logits exists at a time. The backward pass
        recomputes the logits.
        """
        if reduce:
            return self.reduced(hidden, reduce), None
        if targets is None:
            return self._outputs(hidden), None
        if not self._is_plain:
            return self._adapted_scores(hidden, targets, temperature, entropy)
        weight, bias = self.layer.weight, self.layer.bias
        return linear_logprobs(
            hidden, weight, targets, temperature=temperature, entropy=entropy, bias=bias
        )

    @property
    def _is_plain(self) -> bool:
        """True for a linear layer without an adapter around it."""
        return type(self.layer).forward is nn.Linear.forward

    def _outputs(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if not (self.precise and self._is_plain):
            return self.layer(hidden).to(wide)
        bias = self.layer.bias
        if bias is not None:
            bias = bias.to(hidden.device, wide)
        return linear(hidden.to(wide), self.layer.weight.to(hidden.device, wide), bias)

    def reduced(
        self, hidden: Float[Tensor, "K H"], reduce: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        """Apply `reduce` to the float32 logits (k, V) of each chunk of rows and concatenate the
        results.

        The backward pass recomputes the logits.
        """

        def reduce_chunk(states: Tensor, rows: slice) -> Tensor:
            return reduce(self._outputs(states), rows)

        chunks = list(row_chunks(len(hidden), self.layer.out_features)) or [slice(0, 0)]
        reduced: list[Tensor] = []
        for rows in chunks:
            result = checkpoint(reduce_chunk, hidden[rows], rows, use_reentrant=False)
            reduced.append(cast(Tensor, result))
        return torch.cat(reduced)

    def _adapted_scores(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        def score_chunk(logits: Tensor, rows: slice) -> Tensor:
            logprobs, entropies = logit_logprobs(
                logits, targets[rows], temperature=temperature, entropy=entropy
            )
            columns = [logprobs]
            if entropies is not None:
                columns.append(entropies)
            return torch.stack(columns, 1)

        scores = self.reduced(hidden, score_chunk)
        return scores[:, 0], scores[:, 1] if entropy else None


def preceding(states: Float[Tensor, "N ..."], places: Int[Tensor, " K"]) -> Float[Tensor, "K ..."]:
    """Return the states one token before each of `places`, which must not start a sequence.

    All reads of the previous token's state go through this function: if a sequence is split, that
    token may be on another rank.
    """
    return states[places - 1]
