"""A model's output layer.

A head turns hidden states into log-probabilities, entropies, logits or values.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from unittest.mock import patch

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from openrlhf.algorithms.tensors import linear_logprobs, linear_reduced, logit_logprobs, row_chunks

P = ParamSpec("P")
T = TypeVar("T")


class LayerWeights(NamedTuple):
    """The weight and bias of a linear layer, without gradient."""

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None


class OutputHead(nn.Module):
    """The output layer after the decoder: a linear layer, possibly wrapped in an adapter.

    The layer may be tied to the embeddings. The layer is a submodule of the head. The head reads
    the layer's weights in its own forward pass, so that ZeRO 3 gathers them once per call. If ZeRO
    3 gathered the weights once per chunk, ranks would wait forever for a rank that has fewer
    chunks. With `precise`, the product is computed in float32 regardless of the weights' dtype,
    because rewards need more than 8 bits of precision. Such a head supports neither `scores` nor
    `reduced`.
    """

    def __init__(self, layer: Any, *, precise: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.precise = precise

    def forward(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `compute(*args, **kwargs)`, where `compute` is a private method of this head.

        The public methods use this forward pass, in which ZeRO 3 gathers the layer's weights.
        """
        return compute(*args, **kwargs)

    def outputs(self, hidden: Float[Tensor, "K H"]) -> Float[Tensor, "K V"]:
        """Return the outputs in at least float32."""
        return self(self._outputs, hidden)

    def scores(
        self,
        hidden: Float[Tensor, "K H"],
        targets: Int[Tensor, " K"],
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
        """Return log-probabilities of `targets`, and entropies in nats if `entropy` is set.

        Only one chunk of logits exists at a time. The backward pass recomputes the logits.
        """
        return self(self._scores, hidden, targets, temperature, entropy)

    def reduced(
        self, hidden: Float[Tensor, "K H"], reduce: Callable[[Tensor, slice], Tensor]
    ) -> Float[Tensor, "K ..."]:
        """Return the results of applying `reduce` to each chunk of float32 logits (k, V).

        `reduce` returns one value or vector per row. Only one chunk of logits exists at a time. The
        backward pass recomputes the logits.
        """
        return self(self._reduced, hidden, reduce)

    def weights(self) -> LayerWeights:
        """Return the layer's weights, which stay valid after the layer is moved or released.

        Raises TypeError for an adapted layer.
        """
        return self(self._weights)

    @property
    def _is_plain(self) -> bool:
        """True for a linear layer without an adapter around it."""
        return type(self.layer).forward is nn.Linear.forward

    def _weights(self) -> LayerWeights:
        if not self._is_plain:
            kind = type(self.layer).__name__
            raise TypeError(f"The output layer is a {kind}, not a linear layer without an adapter.")
        weight, bias = self.layer.weight, self.layer.bias
        return LayerWeights(_kept(weight), None if bias is None else _kept(bias))

    def _outputs(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if not (self.precise and self._is_plain):
            return self.layer(hidden).to(wide)
        bias = self.layer.bias
        if bias is not None:
            bias = bias.to(hidden.device, wide)
        return linear(hidden.to(wide), self.layer.weight.to(hidden.device, wide), bias)

    def _reduced(self, hidden: Tensor, reduce: Callable[[Tensor, slice], Tensor]) -> Tensor:
        assert not self.precise, "only outputs are computed in float32"
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

    def _scores(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._is_plain:
            assert not self.precise, "only outputs are computed in float32"
            weight, bias = self.layer.weight, self.layer.bias
            return linear_logprobs(
                hidden, weight, targets, temperature=temperature, entropy=entropy, bias=bias
            )

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
