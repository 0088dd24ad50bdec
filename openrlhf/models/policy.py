"""Causal language models as functions from tokens to their log-probabilities."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from openrlhf.algorithms.tensors import widened
from openrlhf.models.backbone import HeadedModel, Outputs
from openrlhf.models.head import OutputHead
from openrlhf.models.loading import LoadSpec, load_causal_lm, reject_transformed_logits

T = TypeVar("T")


class TokenScores(NamedTuple):
    """Log-probabilities and entropies per token on the flat axis; zero for tokens outside `wanted`.

    The class is a tuple because ZeRO 3 hooks look only into tuples.
    """

    logprobs: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"] | None = None
    aux_loss: Float[Tensor, ""] | None = None  # load-balancing loss of a mixture of experts


class PolicyModel(HeadedModel):
    """A model that computes log π(token_t | tokens before it) for flat batches.

    The results do not depend on packing or padding. Raises ModelError for a model that transforms
    logits after the output layer.
    """

    def __init__(self, hf: PreTrainedModel, *, packing: bool, balancing: bool = False) -> None:
        reject_transformed_logits(hf.config)
        head = OutputHead(hf.get_output_embeddings())
        super().__init__(hf, head, packing=packing, balancing=balancing)

    @classmethod
    def load(cls, spec: LoadSpec, *, balancing: bool = False) -> Self:
        """Load the model of `spec`. Raises ModelError as `load_causal_lm` does."""
        model = cls(load_causal_lm(spec), packing=spec.ds.packing_samples, balancing=balancing)
        model.max_len = spec.max_len
        return model

    def forward(
        self,
        tokens: Int[Tensor, " N"],
        offsets: Int[Tensor, " B+1"],
        wanted: Bool[Tensor, " N"],
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the `wanted` tokens. The first token of a sequence has no predecessor and gets 0.

        Logits are computed only for the wanted tokens, one chunk at a time.
        """
        scored = wanted.clone()
        scored[offsets[:-1]] = False
        # The CPU waits for the GPU here, and therefore not after it has started the decoder.
        targets = scored.nonzero()[:, 0]
        decoded = self.decode(tokens, offsets)
        # A token is scored from the state of the preceding token.
        previous = decoded.held(targets - 1)
        places = previous + 1
        logprobs, entropies = self.head.scores(
            decoded.at(previous), tokens[places], temperature, entropy
        )
        if entropies is not None:
            entropies = decoded.column(entropies, places)
        return TokenScores(
            logprobs=decoded.column(logprobs, places),
            entropy=entropies,
            aux_loss=decoded.aux_loss,
        )


class LogitSource(NamedTuple):
    """Hidden states and the output layer that turns them into logits.

    The states and the layer take much less memory than the logits. The class is a tuple because
    ZeRO 3 hooks look only into tuples.
    """

    states: Float[Tensor, "K H"]
    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None

    def logits(self, rows: slice | Int[Tensor, " k"]) -> Float[Tensor, "k V"]:
        """Return the float32 logits at some of the K positions."""
        return widened(linear(self.states[rows], self.weight, self.bias))


class LogitModel(PolicyModel):
    """A language model that also computes functions of its logits.

    Call it with `reduced_logits` or `logit_source`.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: Int[Tensor, " N"],
        offsets: Int[Tensor, " B+1"],
        at: Bool[Tensor, " N"],
        compute: Callable[["LogitModel", Tensor, Tensor, Tensor], T] = PolicyModel.forward,
    ) -> T:
        """Return `compute(self, tokens, offsets, at)`.

        By default, score the tokens selected by `at`.
        """
        return compute(self, tokens, offsets, at)

    def reduced(
        self,
        tokens: Tensor,
        offsets: Tensor,
        at: Tensor,
        *,
        reduce: Callable[[Tensor, slice | Tensor], Tensor],
    ) -> Outputs:
        """Return the result of `reduced_logits`."""
        own = self.decode(tokens, offsets).only(at)

        def reduce_own(logits: Tensor, chunk: slice) -> Tensor:
            if own.places is None:
                return reduce(logits, chunk)
            return reduce(logits, own.places[chunk])

        values = self.head.reduced(own.states, reduce_own)
        return Outputs(own.column(values), own.aux_loss)

    def source(self, tokens: Tensor, offsets: Tensor, at: Tensor) -> LogitSource:
        """Return the result of `logit_source`."""
        own = self.decode(tokens, offsets).only(at)
        return LogitSource(own.column(own.states).detach(), *self.head.weights())


def reduced_logits(
    model: Any,
    tokens: Int[Tensor, " N"],
    offsets: Int[Tensor, " B+1"],
    at: Bool[Tensor, " N"],
    reduce: Callable[[Tensor, slice | Tensor], Tensor],
) -> Outputs:
    """Return `reduce(logits (k, V), rows)` for the positions `at`, concatenated over the chunks.

    `model` is a `LogitModel`, possibly wrapped in an engine or a `FrozenModel`. The logits at a
    position predict the next token. Only one chunk of logits exists at a time.
    """
    return model(tokens, offsets, at, partial(LogitModel.reduced, reduce=reduce))


def logit_source(
    model: Any, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"], at: Bool[Tensor, " N"]
) -> LogitSource:
    """Return the source of a model's logits at the positions `at`, without gradient.

    `model` is a `LogitModel`, possibly wrapped in an engine or a `FrozenModel`. The logits at a
    position predict the next token.
    """
    return model(tokens, offsets, at, LogitModel.source)
