"""A model's output layer.

A head turns hidden states into log-probabilities, entropies, logits or values.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from openrlhf.algorithms.tensors import linear_logprobs, linear_reduced, logit_logprobs, row_chunks


class OutputHead(nn.Module):
    """The output layer after the decoder: one linear layer, or an adapter around it.

    The layer may be tied to the embeddings. The layer is a submodule of the head. The head reads
    the layer's weights in its own forward pass, so that ZeRO 3 gathers them once per call. With one
    gather per chunk, ranks would wait forever for a rank that has fewer chunks. With `precise`, the
    product is computed in float32 regardless of the weights' dtype, because rewards need more than
    8 bits of precision. A head with `precise` only returns outputs.
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
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities (K,) of `targets`, and entropies in nats if `entropy` is set.

        With `reduce`, return the results of applying it to each chunk of float32 logits (k, V), one
        per row. With `weights`, return the layer's weight (V, H) and bias (V,) without gradient.
        Otherwise, return the outputs (K, V).

        Except when outputs are returned, only one chunk of logits exists at a time. The backward
        pass recomputes the logits.
        """
        if weights:
            return self._weights()
        if reduce:
            assert not self.precise, "only outputs are computed in float32"
            return self._reduced(hidden, reduce), None
        if targets is None:
            return self._outputs(hidden), None
        assert not self.precise, "only outputs are computed in float32"
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

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias. The returned tensors stay valid after the layer is moved
        or released.

        Raises TypeError for an adapted layer.
        """
        if not self._is_plain:
            kind = type(self.layer).__name__
            raise TypeError(f"The output layer is a {kind}, not a linear layer without an adapter.")
        weight, bias = self.layer.weight, self.layer.bias
        return _kept(weight), None if bias is None else _kept(bias)

    def _outputs(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if not (self.precise and self._is_plain):
            return self.layer(hidden).to(wide)
        bias = self.layer.bias
        if bias is not None:
            bias = bias.to(hidden.device, wide)
        return linear(hidden.to(wide), self.layer.weight.to(hidden.device, wide), bias)

    def _reduced(self, hidden: Tensor, reduce: Callable[[Tensor, slice], Tensor]) -> Tensor:
        if self._is_plain:
            return linear_reduced(hidden, self.layer.weight, reduce, bias=self.layer.bias)
        _read_weights(self.layer)

        def reduce_chunk(states: Tensor, rows: slice) -> Tensor:
            with _without_hooks(self.layer):
                logits = self._outputs(states)
            return reduce(logits, rows)

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

        scores = self._reduced(hidden, score_chunk)
        return scores[:, 0], scores[:, 1] if entropy else None


def _kept(parameter: Tensor) -> Tensor:
    """Return a parameter's values, copied if ZeRO 3 would free the parameter's memory."""
    values = parameter.detach()
    if hasattr(parameter, "ds_shape"):
        return values.clone()
    return values


def _read_weights(layer: nn.Module) -> None:
    """Read all weights of an adapted layer, so that ZeRO 3 gathers them for the calling module.

    ZeRO 3 gathers a weight that is read in a module's forward pass, keeps it until that pass ends,
    and gathers it again for that module's backward pass.
    """
    for module in layer.modules():
        for name in module._parameters:
            getattr(module, name)


@contextmanager
def _without_hooks(layer: nn.Module) -> Iterator[None]:
    """Call the modules of an adapted layer without their forward hooks until the block exits.

    Under ZeRO 3, the hooks gather and free weights, which requires all ranks.
    """
    with ExitStack() as stack:
        for module in layer.modules():
            for hooks in ("_forward_pre_hooks", "_forward_hooks"):
                stack.enter_context(patch.object(module, hooks, OrderedDict()))
        yield


def preceding(states: Float[Tensor, "N ..."], places: Int[Tensor, " K"]) -> Float[Tensor, "K ..."]:
    """Return the states one token before each of `places`, which must not start a sequence.

    All reads of the previous token's state go through this function: if a sequence is split, that
    token may be on another rank.
    """
    return states[places - 1]
