"""A causal language model as a function from tokens to the log-probabilities of the tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.models.backbone import decode, require_balanced_experts
from openrlhf.models.head import OutputHead, preceding
from openrlhf.models.loading import reject_transformed_logits


class TokenScores(NamedTuple):
    """Results per token on the flat axis; zero for tokens that were not wanted.

    A tuple, because the hooks of ZeRO 3 look into tuples.
    """

    logprobs: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"] | None = None
    aux_loss: Float[Tensor, ""] | None = None  # of a mixture of experts


class PolicyModel(nn.Module):
    """log π(token_t | tokens before it) for flat batches. The numbers are the same for packing and for padding.

    `packing`: run all sequences as one row without padding; otherwise as a right-padded block. `balancing`: compute the
    load-balancing loss of a mixture of experts in training. Raises ModelError if `balancing` is set for another model.
    """

    def __init__(self, hf: PreTrainedModel, *, packing: bool, balancing: bool = False) -> None:
        super().__init__()
        reject_transformed_logits(hf.config)
        if balancing:
            require_balanced_experts(hf)
        self.hf = hf
        self.head = OutputHead(hf.get_output_embeddings())
        self.packing, self.balancing = packing, balancing

    @property
    def config(self) -> PretrainedConfig:
        """The Transformers configuration, which DeepSpeed and the exports read."""
        return self.hf.config

    def forward(
        self,
        tokens: Int[Tensor, " N"],
        offsets: Int[Tensor, " B+1"],
        wanted: Bool[Tensor, " N"],
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the `wanted` tokens. The first token of a sequence has no predecessor and scores 0.

        Logits are made for wanted tokens only, one chunk at a time.
        """
        balancing = self.balancing and self.training
        hidden, aux_loss = decode(self.hf.get_decoder(), tokens, offsets, packing=self.packing, balancing=balancing)
        scored = wanted.clone()
        scored[offsets[:-1]] = False
        places = scored.nonzero()[:, 0]
        logprobs, entropies = self.head(preceding(hidden, places), tokens[places], temperature, entropy)
        blank = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device)
        return TokenScores(
            logprobs=blank.index_put((places,), logprobs),
            entropy=None if entropies is None else blank.index_put((places,), entropies),
            aux_loss=aux_loss,
        )
