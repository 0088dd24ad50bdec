"""The output layer of a model: hidden states in; log-probabilities, entropies, logits or values
out.
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
    """The output layer after the decoder: one linear layer, perhaps tied to the embeddings, or an
    adapter around it.

    The head has the layer as a submodule and reads its weight in its own forward. So ZeRO 3 learns
    to gather the weight. `precise`: multiply in float32 whatever the dtype of the weights, because
    rewards need more than 8 bits.
    """

    def __init__(self, layer: Any, *, precise: bool = False) -> None:
        super().__init__()
        self.layer, self.precise = layer, precise

    def forward(
        self,
        hidden: Float[Tensor, "K H"],
        targets: Int[Tensor, " K"] | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        reduce: Callable[[Tensor, slice], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (K,) of `targets`, and entropies in nats if asked for; without targets
        the outputs (K, V).

        With `reduce`: what it makes of the outputs of each chunk of rows.

        Log-probabilities hold the logits of one chunk at a time. The backward computes the logits
        again.
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
        """Whether the layer is a linear layer that nothing wraps."""
        return type(self.layer).forward is nn.Linear.forward

    def _outputs(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if not (self.precise and self._is_plain):
            return self.layer(hidden).to(wide)
        bias = None if self.layer.bias is None else self.layer.bias.to(hidden.device, wide)
        return linear(hidden.to(wide), self.layer.weight.to(hidden.device, wide), bias)

    def reduced(
        self, hidden: Float[Tensor, "K H"], reduce: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        """What `reduce` makes of the logits (k, V), in float32, of each chunk of rows. The backward
        computes the logits again.
        """

        def of_chunk(states: Tensor, rows: slice) -> Tensor:
            return reduce(self._outputs(states), rows)

        chunks = list(row_chunks(len(hidden), self.layer.out_features)) or [slice(0, 0)]
        return torch.cat(
            [
                cast(Tensor, checkpoint(of_chunk, hidden[rows], rows, use_reentrant=False))
                for rows in chunks
            ]
        )

    def _adapted_scores(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        def of_chunk(logits: Tensor, rows: slice) -> Tensor:
            scores = logit_logprobs(logits, targets[rows], temperature=temperature, entropy=entropy)
            return torch.stack([each for each in scores if each is not None], 1)

        scores = self.reduced(hidden, of_chunk)
        return scores[:, 0], scores[:, 1] if entropy else None


def preceding(states: Float[Tensor, "N ..."], places: Int[Tensor, " K"]) -> Float[Tensor, "K ..."]:
    """The states one token before each of `places`. No place begins a sequence.

    No other code reads the state of the token before: in a split sequence, that token may be on
    another rank.
    """
    return states[places - 1]
