"""The decoder under a head, run over flat tokens: as one packed row, or as a right-padded block."""

import sys
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
from openrlhf.models.shared_prefixes import SharedPrefixes

ATTENTION = {
    "full_attention",
    "sliding_attention",
}  # layer types that are attention of Transformers' registry


class Outputs(NamedTuple):
    """Numbers by place, and the load-balancing loss of a mixture of experts, if asked for.

    A tuple, because the hooks of ZeRO 3 look into tuples.
    """

    values: Float[Tensor, "K ..."]
    aux_loss: Float[Tensor, ""] | None = None


def has_balanced_experts(hf: PreTrainedModel) -> bool:
    """Whether a model is a mixture of experts for which Transformers has a load-balancing loss."""
    known = hasattr(sys.modules[type(hf).__module__], "load_balancing_loss_func")
    return known and hasattr(hf.config.get_text_config(), "num_experts_per_tok")


def _document_arguments(offsets: Tensor, attention: str) -> dict[str, Any]:
    """The borders of the documents in a packed row, as keyword arguments of the attention in use."""
    lengths = offsets.diff()
    if attention == packed_attention.NAME:
        return {"document_lengths": lengths.tolist(), "document_offsets": offsets.int()}
    cumulative, longest = offsets.int(), int(lengths.max())
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


class HeadedModel(nn.Module):
    """A Transformers model whose decoder runs on flat batches, under an output head. Exports read
    the submodule `hf`.

    `packing`: run all sequences as one row without padding; otherwise as a right-padded block.
    `balancing`: compute the load-balancing loss of a mixture of experts in training. Raises
    ModelError if `balancing` is set for another model.
    """

    max_len: int | None = None  # tokens of the longest sequence of the run, if it is known

    def __init__(
        self, hf: PreTrainedModel, head: OutputHead, *, packing: bool, balancing: bool
    ) -> None:
        super().__init__()
        if balancing and not has_balanced_experts(hf):
            raise ModelError(
                f"{hf.name_or_path} ({hf.config.model_type}) has no experts with a known load-balancing loss: leave out "
                "--actor.aux_loss_coef (in RL), --model.aux_loss_coef (elsewhere)"
            )
        self.hf, self.head = hf, head
        self.packing, self.balancing = packing, balancing

    @property
    def config(self) -> PretrainedConfig:
        """The Transformers configuration, which DeepSpeed and the exports read."""
        return self.hf.config

    def shared_prefixes(
        self, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]
    ) -> SharedPrefixes | None:
        """What this model computes once for several sequences. None if the row is padded or shares
        little, or if a layer that is not attention must see whole sequences.
        """
        config: Any = self.hf.get_decoder().config
        known = config._attn_implementation in (packed_attention.NAME, packed_attention.FLASH)
        causal = set(getattr(config, "layer_types", None) or ()) <= ATTENTION
        return SharedPrefixes.of(tokens, offsets) if self.packing and known and causal else None

    def decode(
        self, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]
    ) -> tuple[Tensor, Tensor | None]:
        """The last hidden state of every token (N, H), and the load-balancing loss, if it is
        computed.

        No sequence sees another, and the numbers are the same for packing and for padding.
        """
        decoder: Any = self.hf.get_decoder()
        balancing, layout = (
            self.balancing and self.training,
            None if self.packing else Layout.of(offsets),
        )
        positions = torch.arange(len(tokens), device=tokens.device)
        positions = positions - offsets[:-1].repeat_interleave(offsets.diff())
        arguments: dict[str, Any] = {"output_router_logits": True} if balancing else {}
        shared = self.shared_prefixes(tokens, offsets)
        if layout is None:
            arguments |= _document_arguments(offsets, decoder.config._attn_implementation)
            if shared:
                arguments["shared_prefixes"] = shared
                tokens, positions = tokens[shared.computed], positions[shared.computed]
            arguments |= {"input_ids": tokens[None], "position_ids": positions[None]}
        else:
            arguments |= {
                "input_ids": layout.gather(tokens),
                "position_ids": layout.gather(positions),
            }
            arguments["attention_mask"] = layout.real.long()
        # With a cache, or any mask, packed documents would attend to each other.
        output = decoder(use_cache=False, **arguments)
        states = output.last_hidden_state.to(
            tokens.device
        )  # a model on several devices leaves them on the last
        states = states[layout.real] if layout else states[0]
        states = states[shared.source] if shared else states
        if not balancing:
            return states, None
        routed = [
            # Padding does not count, and what sequences share counts for each.
            logits[layout.real.flatten()] if layout else logits[shared.source] if shared else logits
            for logits in output.router_logits
        ]
        return states, load_balancing_loss(
            routed, top_k=decoder.config.get_text_config().num_experts_per_tok
        )
