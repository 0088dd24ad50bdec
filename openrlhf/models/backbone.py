"""The decoder under a head, run over flat tokens: as one packed row, or as a right-padded block."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.algorithms.experts import load_balancing_loss
from openrlhf.batches import Layout
from openrlhf.models import packed_attention
from openrlhf.models.head import OutputHead
from openrlhf.models.loading import ModelError


class Outputs(NamedTuple):
    """Numbers by place, and the load-balancing loss of a mixture of experts, if asked for.

    A tuple, because the hooks of ZeRO 3 look into tuples.
    """

    values: Float[Tensor, "K ..."]
    aux_loss: Float[Tensor, ""] | None = None


def decode(
    decoder: Any, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"], *, packing: bool, balancing: bool = False
) -> Outputs:
    """The last hidden state of every token. No sequence sees another, and the numbers are the same for packing and for padding.

    `decoder` is a Transformers model without its head. `packing`: all sequences as one row without padding.
    `balancing`: also compute the load-balancing loss of the routers over these tokens.
    """
    asked = {"output_router_logits": True} if balancing else {}
    lengths = offsets.diff()
    positions = torch.arange(len(tokens), device=tokens.device)
    positions = positions - offsets[:-1].repeat_interleave(lengths)
    if packing:
        output = decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,  # with a cache, or any mask, documents would attend to each other
            **_document_arguments(offsets, decoder.config._attn_implementation),
            **asked,
        )
        states = output.last_hidden_state[0].to(tokens.device)  # a model on several devices leaves them on the last
        return Outputs(states, _aux_loss(decoder, output.router_logits) if balancing else None)
    layout = Layout.of(offsets)
    output = decoder(
        input_ids=layout.gather(tokens),
        attention_mask=layout.real.long(),
        position_ids=layout.gather(positions),
        use_cache=False,
        **asked,
    )
    states = output.last_hidden_state.to(tokens.device)[layout.real]
    if not balancing:
        return Outputs(states)
    routed = [logits[layout.real.flatten()] for logits in output.router_logits]  # padding does not count
    return Outputs(states, _aux_loss(decoder, routed))


def _aux_loss(decoder: Any, router_logits: Sequence[Tensor]) -> Tensor:
    return load_balancing_loss(router_logits, top_k=decoder.config.get_text_config().num_experts_per_tok)


def has_balanced_experts(hf: PreTrainedModel) -> bool:
    """Whether a model is a mixture of experts for which Transformers has a load-balancing loss."""
    known = hasattr(sys.modules[type(hf).__module__], "load_balancing_loss_func")
    return known and hasattr(hf.config.get_text_config(), "num_experts_per_tok")


def require_balanced_experts(hf: PreTrainedModel) -> None:
    """Raise ModelError for a model without experts for which Transformers has a load-balancing loss."""
    if not has_balanced_experts(hf):
        raise ModelError(
            f"{hf.name_or_path} ({hf.config.model_type}) has no experts with a known load-balancing loss: leave out "
            "--actor.aux_loss_coef (in RL), --model.aux_loss_coef (elsewhere)"
        )


def _document_arguments(offsets: Tensor, attention: str) -> dict[str, Any]:
    """The borders of the documents in a packed row, as keyword arguments of the attention in use."""
    lengths = offsets.diff()
    if attention == packed_attention.NAME:
        return {"document_lengths": lengths.tolist()}
    cumulative, longest = offsets.int(), int(lengths.max())
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}


class HeadedModel(nn.Module):
    """A Transformers model whose decoder runs on flat batches, under an output head. Exports read the submodule `hf`.

    `packing`: run all sequences as one row without padding; otherwise as a right-padded block. `balancing`: compute the
    load-balancing loss of a mixture of experts in training. Raises ModelError if `balancing` is set for another model.
    """

    def __init__(self, hf: PreTrainedModel, head: OutputHead, *, packing: bool, balancing: bool) -> None:
        super().__init__()
        if balancing:
            require_balanced_experts(hf)
        self.hf, self.head = hf, head
        self.packing, self.balancing = packing, balancing

    @property
    def config(self) -> PretrainedConfig:
        """The Transformers configuration, which DeepSpeed and the exports read."""
        return self.hf.config

    def decode(self, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]) -> tuple[Tensor, Tensor | None]:
        """Hidden states (N, H), and the load-balancing loss, if it is computed."""
        balancing = self.balancing and self.training
        return decode(self.hf.get_decoder(), tokens, offsets, packing=self.packing, balancing=balancing)
